// A GPU that torch takes for one: a build of torch without CUDA has its places for it free.
//
// This is what Python calls; see queues.h, memory.h, runtime.h, kernels.h and natives.h.
#include "natives.h"

struct _object;
_object* THPGenerator_Wrap(const at::Generator& generator);
_object* THPVariable_Wrap(const at::TensorBase& tensor);

using namespace gpu;

extern "C" {
extern _object* PyExc_RuntimeError;
void PyErr_SetString(_object*, const char*);
void PyErr_Print();
_object* PyObject_CallNoArgs(_object*);
int PyObject_IsTrue(_object*);
void Py_IncRef(_object*);
void Py_DecRef(_object*);
int PyGILState_Ensure();
void PyGILState_Release(int);
}

// Calls a function whose errors become Python's: ctypes passes none of C++'s on.
template <class Function>
auto told(Function function) -> decltype(function()) {
  try {
    return function();
  } catch (const c10::Error& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what_without_backtrace());
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  }
  return decltype(function())();
}

#pragma GCC visibility push(default)
extern "C" {

int standin_install() {  // must come before torch first asks for CUDA; 1 if it does not
  finish_sparse();
  c10::SetAllocator(kType, new DeviceMemory, 1);
  at::setHostAllocator(kType, &pinned_memory(), 1);
  c10::impl::DeviceGuardImplRegistrar(kType, new Guard);
  at::CUDAHooksRegistry()->Register(
      "CUDAHooks",
      [](at::CUDAHooksArgs args) -> std::unique_ptr<at::CUDAHooksInterface> {
        return std::make_unique<Hooks>(args);
      },
      c10::REGISTRY_PREFERRED);
  return !at::detail::getCUDAHooks().isBuilt();
}

int standin_count() { return int(chips().size()); }
int standin_physical(int device) { return chips().at(device).physical; }
int standin_current() { return current; }
int standin_choose(int device) {
  if (device < 0 || device >= standin_count()) return 1;
  current = device;
  return 0;
}
int64_t standin_stream(int device) { return chosen[number(device)]; }
void standin_choose_stream(int device, int64_t id) { chosen[device] = id; }

// Queues work that is asked, again and again, whether it has ended.
void standin_queue(int device, int64_t id, _object* ended) {
  Lock lock;
  Py_IncRef(ended);
  queue(device, id).add_polled([ended] {
    int gil = PyGILState_Ensure();
    _object* said = PyObject_CallNoArgs(ended);
    if (!said) PyErr_Print();
    bool over = !said || PyObject_IsTrue(said);
    if (said) Py_DecRef(said);
    if (over) Py_DecRef(ended);
    PyGILState_Release(gil);
    return over;
  });
}
void* standin_kernels_address(void* at) { return behind(at); }
double standin_elapsed(void* one, void* other) {
  return told([&] { return Guard().elapsedTime(one, other, 0); });
}
_object* standin_generator(int device) { return THPGenerator_Wrap(generator(device)); }

// What tests ask for, by name: -1 if there is no such number.
int64_t standin_number(const char* name, int device) {
  Lock lock;
  auto& all = state();
  std::string asked = name;
  if (asked == "inherited") return all.inherited;
  auto& one = chips().at(device);
  if (asked == "started") return one.started;
  if (asked == "live") return one.live;
  if (asked == "peak") return one.peak;
  if (asked == "reserved") return one.used;
  if (asked == "taken") return one.taken;
  if (asked == "freed") return one.freed;
  if (asked == "awaiting") return int64_t(one.awaiting.size());
  if (asked == "waits") return all.waits;
  if (asked == "launches") return all.launches;
  if (asked == "crossings") return all.crossings;
  if (asked == "torn") return all.torn;
  int64_t pending = 0;
  for (auto& [_, queue] : one.queues) pending += queue->asked - queue->done;
  return asked == "pending" ? pending : -1;
}
void standin_switch(const char* name, int value) {
  std::string asked = name;
  if (asked == "others_first") state().others_first = value;
  if (asked == "no_register") state().no_register = value;
  if (asked == "expandable") state().expandable = value;
}
void standin_forget_torn() { state().torn = 0; }
void standin_reset_peak(int device) { chips().at(device).peak = chips().at(device).live; }
void standin_collect() {
  Lock lock;
  for (auto& one : chips()) collect(one);
}

int standin_register(char* at, size_t size) { return register_host(at, size); }
int standin_unregister(char* at) { return unregister_host(at); }
void standin_resize(c10::StorageImpl* storage, size_t bytes) {
  told([&] { resize_storage(storage, bytes); });
}

// A handle of exported memory: descriptor, offset and the number of the count of its readers.
void standin_export(c10::StorageImpl* storage, int64_t* handle) {
  told([&] {
    Chip& one = chip(storage->device().index());
    handle[0] = one.fd;
    handle[1] = static_cast<const char*>(storage->data()) - one.front;
    handle[2] = exported(*storage);
  });
}
_object* standin_open(int pid, int fd, int64_t offset, int64_t bytes, int64_t number, int device) {
  return told([&] { return THPVariable_Wrap(opened(pid, fd, offset, bytes, number, device)); });
}
void standin_read(int pid, int fd, int64_t number) { read(pid, fd, number); }
}
#pragma GCC visibility pop

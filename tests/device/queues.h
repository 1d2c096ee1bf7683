// Time on the device: work lies in queues, and nothing runs it but a wait.
//
// A program that reads before it waits therefore reads wrong values in every run, not now and then.
// What may be overtaken shows in the other extreme: with `others_first`, a wait for one stream runs
// all that the other streams may run by then.
#pragma once

#include <c10/util/Exception.h>

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

extern "C" {
int PyGILState_Check();
struct _ts* PyEval_SaveThread();
void PyEval_RestoreThread(struct _ts*);
}

namespace gpu {

constexpr size_t kBytes = size_t(8) << 30;  // of one device
constexpr size_t kCounters = 1 << 13;       // of readers in other processes, at the memory's end
constexpr size_t kUsable = kBytes - kCounters * sizeof(int64_t);

// The one lock of all state. Who has to wait for it gives up the GIL: work that another thread runs
// may be the last to hold an object of Python's.
class Lock {
 public:
  Lock() { take(1); }
  ~Lock() { give(); }
  Lock(const Lock&) = delete;

  static void pause() {  // lets other threads have it
    int times = depth;
    for (int n = 0; n < times; ++n) give();
    auto* thread = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    usleep(100);
    if (thread) PyEval_RestoreThread(thread);
    take(times);
  }

 private:
  static void take(int times) {
    if (times && !mutex().try_lock()) {
      auto* thread = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
      mutex().lock();
      if (thread) PyEval_RestoreThread(thread);
    }
    for (int n = 1; n < times; ++n) mutex().lock();
    depth += times;
  }
  static void give() {
    --depth;
    mutex().unlock();
  }
  static std::recursive_mutex& mutex() {
    static auto* one = new std::recursive_mutex;
    return *one;
  }
  static inline thread_local int depth = 0;
};

struct Queue;

// A block of memory that is in use, or that another process may still read.
struct Block {
  char* at;
  size_t size;
  Queue* home;                  // the stream that it was taken on
  bool grows;                   // in a segment that does, which other processes cannot open
  std::set<Queue*> users;       // those that it was recorded for
  int64_t* readers = nullptr;   // in other processes, if it was exported
};

struct Chip {
  int physical = 0;
  bool started = false;  // has a context
  int fd = -1;
  char* front = nullptr;  // what addresses of tensors name; nobody may read there
  char* back = nullptr;   // the same pages, for kernels
  size_t used = 0, live = 0, peak = 0;
  int64_t taken = 0, freed = 0;  // bytes in all
  std::map<int64_t, std::unique_ptr<Queue>> queues;
  std::map<std::pair<Queue*, size_t>, std::vector<char*>> spare;
  std::vector<Block*> awaiting;  // freed here, but not by their readers elsewhere
  std::vector<int64_t> free_counters;
  int64_t counters = 0;
};

struct Arena {  // memory of another process's device
  char *front, *back;
  int pid, fd, device;
};

struct State {
  std::vector<Chip> chips;
  std::atomic<bool> counted{false};
  bool inherited = false;  // a parent's device
  std::vector<Arena> foreign;
  std::string failed;   // a kernel did: as with CUDA, the process computes nothing more
  std::string untaken;  // an error that the next launch tells of
  int64_t streams = 0, waits = 0, launches = 0, crossings = 0, torn = 0;
  double clock = 0;
  int others_first = 0, no_register = 0, expandable = 0;  // switches of tests
};

inline State& state() {  // never destroyed: what queues hold may need an interpreter to end
  static auto* one = new State;
  return *one;
}

struct Queue {
  int device;
  int64_t id, asked = 0, done = 0;
  bool busy = false;
  std::deque<std::function<bool()>> works;  // false: others have to do something before

  int64_t add_polled(std::function<bool()> work) {
    works.push_back(std::move(work));
    return ++asked;
  }
  int64_t add(std::function<void()> work) {
    return add_polled([work = std::move(work)] { return work(), true; });
  }

  bool run(int64_t position) {  // what was asked for up to there; tells if that is done
    while (done < position && !works.empty() && !busy) {
      bool ended = true;
      busy = true;
      try {
        ended = works.front()();
      } catch (const c10::Error& e) {
        state().failed = e.what_without_backtrace();
      } catch (const std::exception& e) {
        state().failed = e.what();
      }
      busy = false;
      if (!ended) return false;
      auto over = std::move(works.front());
      works.pop_front();
      ++done;
      state().clock += 0.01;
    }
    return done >= position;
  }

  void finish(int64_t position) {  // as long as it takes
    while (!run(position) && !busy) Lock::pause();
  }
};

inline void check_whole() {
  TORCH_CHECK(state().failed.empty(), "CUDA error: device-side assert triggered (",
              state().failed.substr(0, 120), ")");
}

// The host waits.
inline void wait(Queue& queue, int64_t position) {
  ++state().waits;
  if (state().others_first)
    for (auto& chip : state().chips)
      for (auto& [_, other] : chip.queues)
        if (other.get() != &queue) other->run(other->asked);
  queue.finish(position);
  check_whole();
}
inline void wait(Queue& queue) { wait(queue, queue.asked); }

// A queue goes on only when another one has come so far.
inline void wait_for(Queue& queue, Queue& other, int64_t position) {
  if (&queue != &other) queue.add_polled([&other, position] { return other.run(position); });
}

inline thread_local int current = 0;
inline thread_local std::map<int, int64_t> chosen;  // this thread's stream of each device

// A forked process has nothing of its parent's device: it counts anew, or, where the parent's was
// started, can do nothing with it.
inline void forked() {
  for (auto& one : state().chips) state().inherited = state().inherited || one.started;
  if (!state().inherited) {
    state().chips.clear();
    state().counted = false;
  }
}

// Counts devices once, as CUDA does, by the mask of the environment.
inline std::vector<Chip>& chips() {
  if (state().counted) return state().chips;
  Lock lock;
  const char *number = std::getenv("STANDIN_GPUS"), *mask = std::getenv("CUDA_VISIBLE_DEVICES");
  int machine = number ? std::atoi(number) : 2;
  std::vector<int> visible;
  for (int n = 0; n < machine && !mask; ++n) visible.push_back(n);
  while (mask && *mask) {
    char* end;
    long n = std::strtol(mask, &end, 10);
    if (end == mask || n < 0 || n >= machine) break;  // the rest counts for nothing
    visible.push_back(int(n));
    mask = *end == ',' ? end + 1 : "";
  }
  if (state().counted) return state().chips;  // by another thread, meanwhile
  state().chips.resize(visible.size());
  for (size_t n = 0; n < visible.size(); ++n) state().chips[n].physical = visible[n];
  static int once = pthread_atfork(nullptr, nullptr, &forked);
  state().counted = true;
  return state().chips;
}

inline int number(int device) { return device < 0 ? current : device; }

inline void check_number(int device) {
  TORCH_CHECK(device >= 0 && device < int(chips().size()), "CUDA error: invalid device ordinal");
}

inline char* mapped(int fd, int rights) {
  void* at = mmap(nullptr, kBytes, rights, MAP_SHARED | MAP_NORESERVE, fd, 0);
  TORCH_CHECK(at != MAP_FAILED, "no address space for the memory of a device");
  return static_cast<char*>(at);
}

// A device that is used has a context from then on.
inline Chip& chip(int device) {
  check_number(device);
  Chip& one = chips()[device];
  TORCH_CHECK(!state().inherited, "Cannot re-initialize CUDA in forked subprocess");
  if (!one.started) {
    one.fd = memfd_create("stand-in gpu", 0);  // other processes open it through this one's /proc
    TORCH_CHECK(one.fd >= 0 && ftruncate(one.fd, kBytes) == 0, "no memory for a device");
    one.front = mapped(one.fd, PROT_NONE);
    one.back = mapped(one.fd, PROT_READ | PROT_WRITE);
    one.started = true;
  }
  return one;
}

inline Queue& queue(int device, int64_t id) {
  auto& found = chip(device).queues[id];
  if (!found) found.reset(new Queue{device, id});
  return *found;
}

inline Queue& queue(int device) { return queue(device, chosen[device]); }

}  // namespace gpu

// What torch asks of a device: the current one, streams, events, generators.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace gpu {

struct Event {
  Queue* on = nullptr;
  int64_t position = 0;
  std::shared_ptr<double> time;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(chips().size()); }
  c10::Device getDevice() const override { return device_of(current); }
  void setDevice(c10::Device device) const override {
    if (!device.has_index()) return;
    check_number(device.index());
    current = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }

  static c10::Stream stream(int device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, device_of(number(device)), id);
  }
  static Queue& of(const c10::Stream& stream) { return queue(stream.device_index(), stream.id()); }
  c10::Stream getStream(c10::Device d) const override {
    return stream(d.index(), chosen[number(d.index())]);
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(d.index(), 0); }
  c10::Stream getNewStream(c10::Device d, int) const override {
    Lock lock;
    return stream(d.index(), ++state().streams);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override {
    return getNewStream(d, 0);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = getStream(next.device());
    chosen[next.device_index()] = next.id();
    return before;
  }
  bool queryStream(const c10::Stream& asked) const override {
    Lock lock;
    return advance(of(asked), of(asked).asked);
  }
  void synchronizeStream(const c10::Stream& one) const override {
    Lock lock;
    wait(of(one));
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    Lock lock;
    wait(queue(number(index), 0));
    for (auto& [_, one] : chip(number(index)).queues) one->finish(one->asked);
    check_whole();
  }

  void record(void** event, const c10::Stream& on, const c10::DeviceIndex device,
              const c10::EventFlag) const override {
    TORCH_CHECK(device == -1 || device == on.device_index(), "Event device ", int(device),
                " does not match recording stream's device ", int(on.device_index()), ".");
    Lock lock;
    Queue& queue = of(on);
    auto time = std::make_shared<double>(0);
    queue.add([time] { *time = state().clock; });
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = {&queue, queue.asked, time};
  }
  void block(void* event, const c10::Stream& behind) const override {
    if (!event) return;
    Lock lock;
    auto& one = *static_cast<Event*>(event);
    wait_for(of(behind), *one.on, one.position);
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    Lock lock;
    auto& one = *static_cast<Event*>(event);
    return advance(*one.on, one.position);
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    Lock lock;
    auto& one = *static_cast<Event*>(event);
    wait(*one.on, one.position);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first && second, "Both events must be recorded before calculating elapsed time.");
    auto &one = *static_cast<Event*>(first), &other = *static_cast<Event*>(second);
    TORCH_CHECK(one.on->done >= one.position && other.on->done >= other.position,
                "Both events must be completed before calculating elapsed time.");
    return *other.time - *one.time;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& on) const override {
    static_cast<DeviceMemory*>(c10::GetAllocator(kType))->recordStream(memory, on);
  }

 private:
  static bool advance(Queue& one, int64_t position) {  // who asks again and again lets time pass
    bool ready = one.done >= position;
    if (!ready) one.run(one.done + 1);
    check_whole();
    return ready;
  }
};

// As CUDA's: a seed and an offset. Each kernel that draws takes numbers of its own of them.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(int device)
      : c10::GeneratorImpl(device_of(device), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  static c10::DeviceType device_type() { return kType; }

  uint64_t draw() {
    uint64_t mixed = (seed_ + offset_ * 0x9E3779B97F4A7C15u) ^ (offset_ >> 7);
    offset_ += 4;
    mixed = (mixed ^ (mixed >> 31)) * 0xBF58476D1CE4E5B9u;
    return mixed ^ (mixed >> 29);
  }
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  uint64_t current_seed() const override { return seed_; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_state(const c10::TensorImpl& given) override {
    TORCH_CHECK(given.numel() == 16 && given.device().is_cpu(), "RNG state is wrong size");
    const auto* both = static_cast<const uint64_t*>(given.data());
    seed_ = both[0], offset_ = both[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor both = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    auto* at = static_cast<uint64_t*>(both.data_ptr());
    at[0] = seed_, at[1] = offset_;
    return both.getIntrusivePtr();
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

inline const at::Generator& generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (size_t n = 0; n < chips().size(); ++n)
      made->push_back(at::make_generator<Generator>(int(n)));
    return made;
  }();
  return all->at(number(device));
}

inline PinnedMemory& pinned_memory() {
  static auto* one = new PinnedMemory;
  return *one;
}

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override { chips(); }
  bool isBuilt() const override { return true; }
  bool hasCUDA() const override { return !chips().empty(); }
  bool isAvailable() const override { return hasCUDA(); }
  bool hasPrimaryContext(c10::DeviceIndex d) const override { return chips().at(d).started; }
  int getNumGPUs() const override { return int(chips().size()); }
  c10::DeviceIndex deviceCount() const override { return Guard().deviceCount(); }
  c10::DeviceIndex current_device() const override { return c10::DeviceIndex(current); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex d) const override { Guard().setDevice(device_of(d)); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    return Guard().exchangeDevice(device_of(d)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override {
    return exchangeDevice(d);
  }
  void deviceSynchronize(c10::DeviceIndex d) const override { Guard().synchronizeDevice(d); }
  at::Allocator* getCUDADeviceAllocator() const override { return c10::GetAllocator(kType); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  bool isPinnedPtr(const void* at) const override {
    Lock lock;
    return pinned_at(at) != nullptr;
  }
  at::Device getDeviceFromPtr(void* at) const override {
    int device = -1;
    TORCH_CHECK(find(at, &device), "The specified pointer resides on host memory.");
    return device_of(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override {
    return generator(d);
  }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override {
    return at::make_generator<Generator>(number(d));
  }
};

}  // namespace gpu

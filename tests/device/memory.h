// Memory: of devices, pinned, registered, and of other processes' devices.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/ops/from_blob.h>

#include <fcntl.h>

#include <algorithm>
#include <cstring>

#include "queues.h"

namespace gpu {

constexpr auto kType = c10::DeviceType::CUDA;
constexpr int kPoison = 0xFF;  // fills what holds nothing: NaN, and -1

inline c10::Device device_of(int index) { return {kType, c10::DeviceIndex(index)}; }

// Where kernels find what lies at an address of a device; null if it is none.
inline char* find(const void* address, int* device = nullptr) {
  auto* at = static_cast<char*>(const_cast<void*>(address));
  auto& all = state().chips;
  for (size_t n = 0; n < all.size(); ++n)
    if (all[n].front && at >= all[n].front && at < all[n].front + kBytes) {
      if (device) *device = int(n);
      return all[n].back + (at - all[n].front);
    }
  for (auto& one : state().foreign)
    if (at >= one.front && at < one.front + kBytes) {
      if (device) *device = one.device;
      return one.back + (at - one.front);
    }
  return nullptr;
}

inline char* behind(const void* address) {
  char* found = find(address);
  return found ? found : static_cast<char*>(const_cast<void*>(address));
}

inline void give_back(Block* block) {
  Queue& home = *block->home;
  Chip& one = chips()[home.device];
  for (Queue* user : block->users) wait_for(home, *user, user->asked);
  char* memory = behind(block->at);
  size_t size = block->size;
  home.add([memory, size] { std::memset(memory, kPoison, size); });
  one.spare[{&home, size}].push_back(block->at);
  one.live -= size;
  one.freed += size;
  if (block->readers) one.free_counters.push_back(block->readers - (int64_t*)(one.back + kUsable));
  delete block;
}

// Give back what readers in other processes have let go of since.
inline void collect(Chip& one) {
  auto awaiting = std::move(one.awaiting);
  one.awaiting.clear();
  for (Block* block : awaiting) {
    if (__atomic_load_n(block->readers, __ATOMIC_SEQ_CST) > 0) one.awaiting.push_back(block);
    else give_back(block);
  }
}

inline void free_block(void* context) {
  Lock lock;
  auto* block = static_cast<Block*>(context);
  if (block->readers && __atomic_load_n(block->readers, __ATOMIC_SEQ_CST) > 0)
    chips()[block->home->device].awaiting.push_back(block);
  else
    give_back(block);
}

inline c10::DataPtr take(int device, size_t bytes) {
  check_number(device);
  if (bytes == 0) return {nullptr, nullptr, [](void*) {}, device_of(device)};
  Lock lock;
  Chip& one = chip(device);
  size_t size = (bytes + 511) / 512 * 512;
  Queue& home = queue(device);
  if (!one.awaiting.empty()) collect(one);
  auto& spare = one.spare[{&home, size}];
  char* at = one.front + one.used;
  if (!spare.empty()) {
    at = spare.back();
    spare.pop_back();
  } else {
    TORCH_CHECK_WITH(OutOfMemoryError, one.used + size <= kUsable, "CUDA out of memory. Tried to "
                     "allocate ", size, " bytes");
    std::memset(one.back + one.used, kPoison, size);
    one.used += size;
  }
  one.live += size;
  one.taken += size;
  one.peak = std::max(one.peak, one.live);
  return {at, new Block{at, size, &home, bool(state().expandable)}, &free_block, device_of(device)};
}

struct DeviceMemory final : c10::Allocator {
  at::DataPtr allocate(size_t bytes) override { return take(current, bytes); }
  at::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    Lock lock;
    queue(current).add([=] { std::memcpy(behind(to), behind(from), bytes); });
  }
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) {
    Lock lock;
    if (memory.get_deleter() == &free_block)
      static_cast<Block*>(memory.get_context())
          ->users.insert(&queue(stream.device_index(), stream.id()));
  }
};

// ---- the host's memory, as far as the device reads and writes it late

struct Range {
  size_t size;
  bool registered;  // by the program, which has to keep it; what torch pinned, a copy keeps
};

inline std::map<char*, Range>& pinned() {
  static auto* all = new std::map<char*, Range>;
  return *all;
}

inline const Range* pinned_at(const void* address) {
  auto* at = static_cast<char*>(const_cast<void*>(address));
  auto after = pinned().upper_bound(at);
  if (after == pinned().begin()) return nullptr;
  --after;
  return at < after->first + after->second.size ? &after->second : nullptr;
}

struct Transfer {  // a copy that uses registered memory, and that nobody has waited for
  char *begin, *end;
  Queue* queue;
  int64_t position;
};

inline std::vector<Transfer>& transfers() {
  static auto* all = new std::vector<Transfer>;
  return *all;
}

inline void transfer(const void* at, size_t bytes, Queue& on) {
  auto& all = transfers();
  std::erase_if(all, [](const Transfer& t) { return t.queue->done >= t.position; });
  auto* begin = static_cast<char*>(const_cast<void*>(at));
  all.push_back({begin, begin + bytes, &on, on.asked});
}

struct PinnedMemory final : at::HostAllocator {
  at::DataPtr allocate(size_t bytes) override {
    Lock lock;
    size_t size = std::max<size_t>((bytes + 63) / 64 * 64, 64);
    auto* at = static_cast<char*>(std::aligned_alloc(64, size));
    std::memset(at, kPoison, size);
    pinned()[at] = {size, false};
    return {at, at, &give, at::kCPU};
  }
  static void give(void* at) {
    Lock lock;
    pinned().erase(static_cast<char*>(at));
    std::free(at);
  }
  at::DeleterFnPtr raw_deleter() const override { return &give; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // copies keep tensors
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

inline int register_host(char* at, size_t size) {
  Lock lock;
  auto after = pinned().lower_bound(at);
  bool overlaps = (after != pinned().end() && after->first < at + size) || pinned_at(at);
  if (overlaps || state().no_register) {
    state().untaken = overlaps ? "part or all of the requested memory range is already mapped"
                               : "operation not supported";
    return overlaps ? 712 : 801;
  }
  pinned()[at] = {size, true};
  return 0;
}

inline int unregister_host(char* at) {
  Lock lock;
  auto found = pinned().find(at);
  if (found == pinned().end() || !found->second.registered) {
    state().untaken = "pointer does not correspond to a registered memory region";
    return 713;
  }
  for (auto& t : transfers())  // CUDA does not promise to wait for it
    if (t.queue->done < t.position && t.begin < at + found->second.size && at < t.end) {
      ++state().torn;
      std::fprintf(stderr, "stand-in GPU: memory is unregistered while a copy uses it\n");
    }
  pinned().erase(found);
  return 0;
}

// ---- memory of a device that another process has exported

// Counts one reader of the block at an address; returns the number of the count.
inline int64_t exported(c10::StorageImpl& storage) {
  Lock lock;
  Chip& one = chip(storage.device().index());
  const auto& memory = storage.data_ptr();
  TORCH_CHECK(memory.get_deleter() == &free_block, "CUDA error: this memory cannot be exported");
  auto* block = static_cast<Block*>(memory.get_context());
  TORCH_CHECK(!block->grows, "pidfd_getfd: Operation not permitted");
  auto* counts = reinterpret_cast<int64_t*>(one.back + kUsable);
  collect(one);
  if (!block->readers) {
    int64_t next = one.counters;
    if (!one.free_counters.empty()) {
      next = one.free_counters.back();
      one.free_counters.pop_back();
    } else {
      TORCH_CHECK(++one.counters <= int64_t(kCounters), "too many exports");
    }
    block->readers = counts + next;
    *block->readers = 0;
  }
  __atomic_add_fetch(block->readers, 1, __ATOMIC_SEQ_CST);
  return block->readers - counts;
}

inline Arena& arena_of(int pid, int fd, int device) {
  for (auto& one : state().foreign)
    if (one.pid == pid && one.fd == fd) return one;
  std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  int own = open(path.c_str(), O_RDWR | O_CLOEXEC);
  TORCH_CHECK(own >= 0, "CUDA error: invalid device context");
  state().foreign.push_back({mapped(own, PROT_NONE), mapped(own, PROT_READ | PROT_WRITE), pid, fd,
                             device});
  close(own);
  return state().foreign.back();
}

// Counts one reader out, also one that has counted itself out, as torch does.
inline void read(int pid, int fd, int64_t number) {
  Lock lock;
  char* back = nullptr;
  if (pid != getpid()) back = arena_of(pid, fd, 0).back;
  for (auto& one : state().chips)
    if (pid == getpid() && one.fd == fd) back = one.back;
  if (!back) return;
  auto* count = reinterpret_cast<int64_t*>(back + kUsable) + number;
  __atomic_sub_fetch(count, 1, __ATOMIC_SEQ_CST);
}

inline at::Tensor opened(int pid, int fd, int64_t offset, int64_t bytes, int64_t number, int index) {
  TORCH_CHECK(pid != getpid(), "CUDA error: invalid device context");  // of its own memory
  Lock lock;
  chip(index);
  auto options = at::TensorOptions(device_of(index)).dtype(at::kByte);
  Arena arena = arena_of(pid, fd, index);
  auto* counts = reinterpret_cast<int64_t*>(arena.back + kUsable);
  TORCH_CHECK(counts[number] > 0, "CUDA error: this export has no reader left");
  auto done = [pid, fd, number](void*) { read(pid, fd, number); };
  return at::from_blob(arena.front + offset, {bytes}, done, options);
}

}  // namespace gpu

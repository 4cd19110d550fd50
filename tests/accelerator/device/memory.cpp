// Memory of the stand-in accelerator: one file of memory, mapped twice.
#include "device.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace standin {
namespace {

constexpr size_t kMemory = size_t(16) << 30;  // address space; a page costs memory once it is written
constexpr size_t kAlignment = 64;
constexpr size_t kDropped = size_t(1) << 20;

// A freed block that another stream had used: that use must be ordered before the owner's next allocation,
// which may get the same bytes.
struct Freed {
  StreamId owner, user;
  Use use;
  size_t nbytes;
};

struct Memory {
  char* forbidden = nullptr;   // PROT_NONE: data_ptr() points here
  char* accessible = nullptr;  // the same pages, readable and writable
  std::map<size_t, size_t> free{{0, kMemory}};  // offset: bytes
  std::vector<Freed> freed;
  std::map<const char*, Block*> pinned;  // by first byte
};

bool initialized = false;
bool bad_fork = false;
struct sigaction previous_handler;
Memory* memory = nullptr;

// Host code that dereferences data_ptr() of a device tensor ends here.
void explain_fault(int, siginfo_t* info, void*) {
  auto* address = static_cast<char*>(info->si_addr);
  if (address >= memory->forbidden && address < memory->forbidden + kMemory) {
    const char text[] = "standin: the host touched device memory. Copy the tensor with .cpu() first.\n";
    [[maybe_unused]] auto written = write(STDERR_FILENO, text, sizeof(text) - 1);
  }
  // The faulting instruction runs again under the previous handler, which ends the process.
  sigaction(SIGSEGV, &previous_handler, nullptr);
}

Memory& device_memory() {
  refuse_fork();
  if (memory == nullptr) {
    int file = memfd_create("standin", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, kMemory) == 0, "standin: no memory file: ", strerror(errno));
    auto map = [&](int rights) {
      void* at = mmap(nullptr, kMemory, rights, MAP_SHARED | MAP_NORESERVE, file, 0);
      TORCH_CHECK(at != MAP_FAILED, "standin: the memory file can't be mapped: ", strerror(errno));
      return static_cast<char*>(at);
    };
    memory = new Memory{map(PROT_NONE), map(PROT_READ | PROT_WRITE)};
    close(file);
    struct sigaction action {};
    action.sa_sigaction = explain_fault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, &previous_handler);
    pthread_atfork(nullptr, nullptr, [] { bad_fork = initialized; });
    initialized = true;
  }
  return *memory;
}

size_t take(size_t nbytes) {
  for (auto [offset, size] : memory->free) {
    if (size >= nbytes) {
      memory->free.erase(offset);
      if (size > nbytes) memory->free[offset + nbytes] = size - nbytes;
      return offset;
    }
  }
  TORCH_CHECK(false, "standin: out of device memory: ", nbytes, " bytes asked for, ", kMemory, " in all");
}

// The pages of a large block cost no memory once it is freed. Smaller blocks keep theirs, for the next ones.
void drop_pages(size_t offset, size_t nbytes) {
  if (nbytes < kDropped) return;
  size_t page = sysconf(_SC_PAGESIZE), first = (offset + page - 1) / page * page;
  madvise(memory->accessible + first, (offset + nbytes) / page * page - first, MADV_REMOVE);
}

void give_back(size_t offset, size_t nbytes) {
  drop_pages(offset, nbytes);
  auto after = memory->free.lower_bound(offset);
  if (after != memory->free.end() && after->first == offset + nbytes) {
    nbytes += after->second;
    after = memory->free.erase(after);
  }
  if (after != memory->free.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == offset) {
      before->second += nbytes;
      return;
    }
  }
  memory->free[offset] = nbytes;
}

// Raises if memory that `stream` may now get again could still be in use on another stream.
void check_freed(StreamId stream) {
  Clock clock = clock_of(stream);
  std::vector<Freed> others, mine;
  for (auto& freed : memory->freed) (freed.owner == stream ? mine : others).push_back(freed);
  memory->freed = others;
  for (auto& freed : mine) {
    bool ordered = freed.user < StreamId(clock.size()) && clock[freed.user] >= freed.use.number;
    TORCH_CHECK(ordered, "standin: a tensor of ", freed.nbytes, " bytes, allocated on stream ", freed.owner,
                ", was freed while ", freed.use.name, " on stream ", freed.user,
                " could still use its memory. Call tensor.record_stream(stream) before the tensor is dropped.");
  }
}

void remember_users(const Block& block) {
  std::map<StreamId, Use> last;
  auto add = [&](StreamId stream, Use use) {
    if (stream >= 0 && stream != block.owner && !block.recorded.count(stream) && last[stream].number < use.number)
      last[stream] = use;
  };
  for (auto& [begin, accesses] : block.accesses) {
    add(accesses.writer, accesses.write);
    for (auto& [stream, use] : accesses.reads) add(stream, use);
  }
  for (auto& [stream, use] : last) memory->freed.push_back({block.owner, stream, use, block.nbytes});
}

void free_device(void* context) {
  if (bad_fork) return;  // the parent's block, not ours
  std::lock_guard guard(lock());
  auto* block = static_cast<Block*>(context);
  remember_users(*block);
  forget_late(block);
  give_back(block->data - memory->forbidden, block->nbytes);
  statistics().allocated -= block->nbytes;
  delete block;
}

void free_pinned(void* context) {
  auto* block = static_cast<Block*>(context);
  if (!bad_fork) {
    std::lock_guard guard(lock());  // no late work is left: it would hold this storage
    device_memory().pinned.erase(block->data);
    statistics().pinned -= block->nbytes;
  }
  free(block->data);
  delete block;
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    std::lock_guard guard(lock());
    auto& all = device_memory();
    if (nbytes == 0) return {nullptr, nullptr, &free_device, {kDevice, 0}};
    StreamId stream = current_stream();
    check_freed(stream);
    nbytes = (nbytes + kAlignment - 1) / kAlignment * kAlignment;
    size_t offset = take(nbytes);
    memset(all.accessible + offset, 0xFF, nbytes);
    auto* block = new Block{all.forbidden + offset, nbytes, false, stream, {}, {}};
    // Earlier work of this stream may still use these bytes, so that other streams have to wait for it.
    Operation fresh("allocation", stream);
    block->accesses[0] = {stream, {fresh.name, fresh.number}, {}};
    auto& sum = statistics();
    sum.peak = std::max(sum.peak, sum.allocated += nbytes);
    return {block->data, block, &free_device, {kDevice, 0}};
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    memcpy(standin::accessible(to), standin::accessible(from), nbytes);
  }
  bool initialized() override { return standin::initialized; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { record_stream(data, stream.id()); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* array : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes}) {
      (*array)[0].current = statistics().allocated;
      (*array)[0].peak = statistics().peak;
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { statistics().peak = statistics().allocated; }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    return {kMemory - statistics().allocated, kMemory};
  }
};

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    std::lock_guard guard(lock());
    auto& all = device_memory();
    if (nbytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    auto* data = static_cast<char*>(aligned_alloc(kAlignment, (nbytes + kAlignment - 1) / kAlignment * kAlignment));
    TORCH_CHECK(data != nullptr, "standin: no ", nbytes, " bytes of pinned memory");
    memset(data, 0xFF, nbytes);
    auto* block = new Block{data, nbytes, true, -1, {}, {}};
    block->accesses[0] = {};
    all.pinned[data] = block;
    statistics().pinned += nbytes;
    return {data, block, &free_pinned, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override { memcpy(to, from, nbytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // late work holds its pinned storage
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

DeviceAllocator device_memory_allocator;
PinnedAllocator pinned_memory_allocator;

}  // namespace

char* accessible(const void* data) {
  if (data == nullptr) return nullptr;
  return memory->accessible + (static_cast<const char*>(data) - memory->forbidden);
}

Block* block_of(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return nullptr;
  const auto& data = tensor.storage().data_ptr();
  if (tensor.device().type() == kDevice) return static_cast<Block*>(data.get_context());
  std::lock_guard guard(lock());
  if (memory == nullptr || data.get() == nullptr) return nullptr;
  auto after = memory->pinned.upper_bound(static_cast<const char*>(data.get()));
  if (after == memory->pinned.begin()) return nullptr;
  Block* block = std::prev(after)->second;
  return data.get() < block->data + block->nbytes ? block : nullptr;
}

bool is_pinned(const void* data) {
  if (bad_fork) return false;
  std::lock_guard guard(lock());
  if (memory == nullptr) return false;
  auto after = memory->pinned.upper_bound(static_cast<const char*>(data));
  if (after == memory->pinned.begin()) return false;
  Block* block = std::prev(after)->second;
  return data < block->data + block->nbytes;
}

void grow(const c10::Storage& storage, size_t nbytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  c10::DataPtr larger = device_memory_allocator.allocate(nbytes);
  if (impl->nbytes() > 0 && nbytes > 0)
    memcpy(accessible(larger.get()), accessible(impl->data()), std::min(impl->nbytes(), nbytes));
  impl->set_data_ptr_noswap(std::move(larger));
  impl->set_nbytes(nbytes);
}

void record_stream(const c10::DataPtr& data, StreamId stream) {
  std::lock_guard guard(lock());
  if (auto* block = static_cast<Block*>(data.get_context())) block->recorded.insert(stream);
}

void refuse_fork() {
  TORCH_CHECK(!bad_fork, "standin: the device was used before this process was forked; a child can't use it. ",
              "Fork before the first use, or start processes with the spawn method.");
}
bool in_bad_fork() { return bad_fork; }

c10::Allocator* device_allocator() { return &device_memory_allocator; }
c10::Allocator* pinned_allocator() { return &pinned_memory_allocator; }
void register_memory() {
  c10::SetAllocator(kDevice, &device_memory_allocator);
  at::setHostAllocator(kDevice, &pinned_memory_allocator);
}

std::recursive_mutex& lock() {
  static auto* mutex = new std::recursive_mutex;
  return *mutex;
}

Statistics& statistics() {
  static Statistics all;
  return all;
}

}  // namespace standin

// Streams, events and vector clocks of the stand-in accelerator, and work that happens late.
#include "device.h"

#include <ATen/core/Generator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <chrono>
#include <cstring>

namespace standin {
namespace {

// So many queries of an event or a stream answer "not yet" before the work is carried out: code that takes the first
// answer for granted fails, code that polls goes on.
constexpr int kQueriesUntilDone = 3;

std::vector<Clock> clocks(1);  // of each stream; stream 0 is the default stream
Clock host_clock;              // what the host knows to have ended, by waiting or by asking
std::list<Late> late;
std::map<StreamId, int> stream_queries;
thread_local StreamId current = 0;

bool reached(const Clock& clock, StreamId stream, uint64_t number) {
  return stream < StreamId(clock.size()) && clock[stream] >= number;
}
bool reached(const Clock& clock, const Clock& other) {
  for (size_t stream = 0; stream < other.size(); ++stream)
    if (other[stream] > 0 && !reached(clock, stream, other[stream])) return false;
  return true;
}
void join(Clock& into, const Clock& other) {
  into.resize(std::max(into.size(), other.size()));
  for (size_t stream = 0; stream < other.size(); ++stream) into[stream] = std::max(into[stream], other[stream]);
}

// The tensor's bytes as few contiguous ranges, so that two columns of one matrix are told apart.
std::vector<Range> ranges(const at::Tensor& tensor, const Block& block) {
  if (tensor.numel() == 0) return {};
  std::vector<std::pair<int64_t, int64_t>> outer;  // stride, size
  for (int64_t d = 0; d < tensor.dim(); ++d)
    if (tensor.size(d) > 1 && tensor.stride(d) > 0) outer.push_back({tensor.stride(d), tensor.size(d)});
  std::sort(outer.begin(), outer.end());
  int64_t run = 1;  // elements in one contiguous range
  while (!outer.empty() && outer.front().first <= run) {
    run += outer.front().first * (outer.front().second - 1);
    outer.erase(outer.begin());
  }
  std::vector<int64_t> starts{0};
  for (auto [stride, size] : outer) {
    size_t inner = starts.size();
    for (int64_t i = 1; i < size; ++i)
      for (size_t j = 0; j < inner; ++j) starts.push_back(starts[j] + i * stride);
  }
  size_t item = tensor.itemsize();
  size_t first = static_cast<const char*>(tensor.const_data_ptr()) - block.data;
  std::vector<Range> all;
  for (int64_t start : starts) all.push_back({first + start * item, first + (start + run) * item});
  return all;
}

std::map<size_t, Accesses>::iterator split(Block& block, size_t at) {
  auto after = block.accesses.lower_bound(at);
  if (after != block.accesses.end() && after->first == at) return after;
  return block.accesses.emplace_hint(after, at, std::prev(after)->second);
}

[[noreturn]] void unordered(const Operation& now, bool write, const Block& block, Range range, StreamId stream,
                            const Use& use, bool wrote) {
  TORCH_CHECK(false, "standin: ", now.name, " on stream ", now.stream, write ? " writes " : " reads ",
              range.end - range.begin, " bytes of a ", block.pinned ? "pinned" : "device", " tensor that ", use.name,
              " on stream ", stream, wrote ? " wrote" : " read",
              ", and no event orders the two. Record an event on stream ", stream, " and let stream ", now.stream,
              " wait for it.");
}

void check_order(const Operation& now, const Clock& clock, const Block& block, Range range, const Accesses& before,
                 bool write) {
  if (before.writer >= 0 && !reached(clock, before.writer, before.write.number))
    unordered(now, write, block, range, before.writer, before.write, true);
  if (!write) return;
  for (auto& [stream, use] : before.reads)
    if (!reached(clock, stream, use.number)) unordered(now, write, block, range, stream, use, false);
}

void carry_out(Late& work) {
  if (std::exchange(work.carried_out, true)) return;
  work.carry_out();
}

// Ends all work that `clock` covers. The host knows of it from now on.
void complete(const Clock& clock) {
  join(host_clock, clock);
  for (auto work = late.begin(); work != late.end();) {
    if (!reached(clock, work->stream, work->number)) {
      ++work;
      continue;
    }
    Late ended = std::move(*work);  // off the list first: both calls may raise
    work = late.erase(work);
    bool early = ended.carried_out;
    carry_out(ended);
    if (early && ended.check) ended.check();
  }
}

}  // namespace

StreamId current_stream() { return current; }

StreamId new_stream() {
  std::lock_guard guard(lock());
  clocks.emplace_back();
  return clocks.size() - 1;
}

Clock clock_of(StreamId stream) {
  std::lock_guard guard(lock());
  join(clocks[stream], host_clock);  // what is issued now comes after all that the host has waited for
  return clocks[stream];
}

void wait_for(StreamId waiting, const Clock& clock) {
  std::lock_guard guard(lock());
  join(clocks[waiting], clock);
}

Operation::Operation(const char* name, StreamId stream) : name(name), stream(stream) {
  refuse_fork();
  std::lock_guard guard(lock());
  auto& clock = clocks[stream];
  join(clock, host_clock);
  clock.resize(std::max<size_t>(clock.size(), stream + 1));
  number = ++clock[stream];
}

void Operation::touches(const at::Tensor& tensor, bool write) {
  Block* block = block_of(tensor);
  if (block == nullptr) return;
  std::lock_guard guard(lock());
  for (auto& work : late)
    if (!work.to_host && std::count(work.touched.begin(), work.touched.end(), block) &&
        reached(clocks[stream], work.stream, work.number))
      carry_out(work);
  for (Range range : ranges(tensor, *block)) {
    auto first = split(*block, range.begin);
    auto last = range.end < block->nbytes ? split(*block, range.end) : block->accesses.end();
    for (auto at = first; at != last; ++at) {
      check_order(*this, clocks[stream], *block, range, at->second, write);
      if (!write) at->second.reads[stream] = {name, number};
    }
    if (!write) continue;
    first->second = {stream, {name, number}, {}};
    block->accesses.erase(std::next(first), last);
  }
}

void Operation::postpone(Late work) {
  std::lock_guard guard(lock());
  work.stream = stream;
  work.number = number;
  late.push_back(std::move(work));
}

void forget_late(Block* block) {
  late.remove_if([&](const Late& work) { return std::count(work.touched.begin(), work.touched.end(), block); });
}

void fill_with_nan(const at::Tensor& tensor) {
  if (Block* block = block_of(tensor))
    for (Range range : ranges(tensor, *block)) {
      char* first = block->data + range.begin;
      memset(block->pinned ? first : accessible(first), 0xFF, range.end - range.begin);
    }
}

void synchronize(const Clock& clock) {
  refuse_fork();
  std::lock_guard guard(lock());
  ++statistics().synchronizations;
  complete(clock);
}

void synchronize_stream(StreamId stream) { synchronize(clock_of(stream)); }

bool query(const Clock& clock, int& queries) {
  refuse_fork();
  std::lock_guard guard(lock());
  if (reached(host_clock, clock)) return true;
  if (++queries < kQueriesUntilDone) return false;
  queries = 0;
  complete(clock);
  return true;
}

namespace {

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::Device device() const { return {kDevice, 0}; }
  c10::Stream stream(StreamId id) const { return c10::Stream(c10::Stream::UNSAFE, device(), id); }

  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device to) const override {
    TORCH_CHECK(to.index() <= 0, "standin: there is one device, ", to, " was asked for");
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(new_stream()); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(new_stream()); }
  c10::Stream exchangeStream(c10::Stream to) const override { return stream(std::exchange(current, to.id())); }
  bool queryStream(const c10::Stream& of) const override {
    std::lock_guard guard(lock());
    return query(clock_of(of.id()), stream_queries[of.id()]);
  }
  void synchronizeStream(const c10::Stream& of) const override { synchronize_stream(of.id()); }
  void synchronizeDevice(c10::DeviceIndex) const override {
    std::lock_guard guard(lock());
    Clock all;
    for (auto& clock : clocks) join(all, clock);
    synchronize(all);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& on) const override {
    record_stream(data, on.id());
  }

  void record(void** event, const c10::Stream& on, c10::DeviceIndex, c10::EventFlag) const override {
    refuse_fork();
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = {clock_of(on.id()), 0, seconds_now()};
  }
  void block(void* event, const c10::Stream& waiting) const override {
    if (event != nullptr) wait_for(waiting.id(), static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    return query(static_cast<Event*>(event)->clock, static_cast<Event*>(event)->queries);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) synchronize(static_cast<Event*>(event)->clock);
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    return 1e3 * (static_cast<Event*>(to)->seconds - static_cast<Event*>(from)->seconds);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
};

}  // namespace

void register_streams() { c10::impl::registerDeviceGuard(kDevice, new Guard); }

}  // namespace standin

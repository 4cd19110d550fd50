// The state of the stand-in accelerator: memory, streams with vector clocks, late work.
//
// Model: an operation is carried out when the host issues it. Issue order is one of the orders that streams and
// events allow, as long as every two operations on the same bytes are ordered by them; vector clocks check exactly
// that and raise otherwise. Only copies between pinned memory and the device, and collectives, happen late, because
// there the host can see the difference.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <vector>

namespace standin {

using c10::StreamId;

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

// Entry `s` counts the operations of stream `s` that come before the clock's owner. Missing entries are 0.
using Clock = std::vector<uint64_t>;

struct Range {
  size_t begin, end;  // bytes, from the start of a block
};

// The last operations on a range of bytes.
struct Use {
  const char* name;  // of an operator; the dispatcher keeps these texts for ever
  uint64_t number;   // of the operation in its stream
};
struct Accesses {
  StreamId writer = -1;  // -1: not written
  Use write{"", 0};
  std::map<StreamId, Use> reads;  // since that write
};

// An allocation, of device memory or of pinned memory.
struct Block {
  char* data;  // device memory: the address without access rights
  size_t nbytes;
  bool pinned;
  StreamId owner;                       // the stream that allocated the block
  std::map<size_t, Accesses> accesses;  // by first byte; an entry reaches to the next one
  std::set<StreamId> recorded;          // streams named by record_stream
};

// Work that is issued but not yet carried out.
struct Late {
  StreamId stream;
  uint64_t number;
  bool to_host;                     // the device's own work does not bring a copy to the host forward
  std::vector<Block*> touched;      // what `carry_out` reads or writes late
  std::function<void()> carry_out;
  std::function<void()> check = {};  // when the host knows the end: was a pinned source overwritten before it?
  bool carried_out = false;
};

struct Event {
  Clock clock;
  int queries = 0;
  double seconds = 0;
};

struct Statistics {
  size_t allocated = 0, peak = 0, pinned = 0;  // bytes
  uint64_t synchronizations = 0;
};

// --- memory ---
Block* block_of(const at::Tensor& tensor);  // nullptr: pageable memory, or no bytes
char* accessible(const void* data);         // the address under which operations reach device memory
void grow(const c10::Storage& storage, size_t nbytes);
void record_stream(const c10::DataPtr& data, StreamId stream);
void register_memory();
bool is_pinned(const void* data);
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

// --- streams ---
StreamId current_stream();
StreamId new_stream();
// An operation of the current stream, or of `stream`. Its constructor takes the next number of the stream.
class Operation {
 public:
  explicit Operation(const char* name, StreamId stream = current_stream());
  // Checks the order with all earlier uses of the tensor's bytes, and carries out late work on them.
  void reads(const at::Tensor& tensor) { touches(tensor, false); }
  void writes(const at::Tensor& tensor) { touches(tensor, true); }
  void touches(const at::Tensor& tensor, bool write);
  // Postpones `carry_out` until the host waits for this operation, or (unless `to_host`) another operation needs it.
  void postpone(Late late);
  const char* name;
  StreamId stream;
  uint64_t number;
};
void fill_with_nan(const at::Tensor& tensor);        // all bytes 0xFF: NaN in every floating dtype
void wait_for(StreamId waiting, const Clock& clock);  // later operations of `waiting` come after `clock`
Clock clock_of(StreamId stream);
void synchronize(const Clock& clock);  // the host waits; counted
void synchronize_stream(StreamId stream);
void forget_late(Block* block);  // the block is about to be freed
bool query(const Clock& clock, int& queries);
void register_streams();

// --- process ---
void refuse_fork();  // raises in a child of a process that has used the device
bool in_bad_fork();
std::recursive_mutex& lock();
Statistics& statistics();

// --- kernels ---
at::Tensor as_cpu(const at::Tensor& tensor);       // the tensor's bytes as a CPU tensor
at::Tensor to_device(const at::Tensor& computed);  // a CPU kernel's output on the device

// --- generator ---
at::Generator& default_generator();
at::Generator new_generator();
at::Generator cpu_generator(const std::optional<at::Generator>& generator);

}  // namespace standin

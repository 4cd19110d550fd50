// A process group for the stand-in accelerator that plays NCCL: collectives on a stream of the group, over Gloo.
//
// A collective starts when it is issued, on copies of its inputs, and ends late. Its `wait` lets the current stream
// wait, not the host. Outputs hold NaN until the end.
#pragma once

#include "device.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace standin {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class GroupWork final : public c10d::Work {
 public:
  GroupWork(c10d::OpType type, StreamId stream, Tensors outputs, WorkPtr transfer, bool host_waits)
      : Work(-1, type),
        clock_(clock_of(stream)),
        outputs_(std::move(outputs)),
        transfer_(std::move(transfer)),
        host_waits_(host_waits) {
    c10::Device device(kDevice, 0);
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<c10::Device>{device});
    // The future is complete at once for the host; who waits for it waits for the group's stream.
    c10::StreamGuard on_stream(c10::Stream(c10::Stream::UNSAFE, device, stream));
    future_->markCompleted(c10::IValue(outputs_));
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    wait_for(current_stream(), clock_);
    if (host_waits_) standin::synchronize(clock_);
  }
  // Does not wait for the other ranks: who asks may give up on a frozen one.
  bool isCompleted() override { return transfer_->isCompleted() && query(clock_, queries_); }
  bool isSuccess() const override { return true; }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  Clock clock_;
  Tensors outputs_;
  WorkPtr transfer_;
  bool host_waits_;
  int queries_ = 0;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class Group final : public c10d::Backend {
 public:
  explicit Group(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), stream_(new_stream()) {}
  const std::string getBackendName() const override { return "standin_nccl"; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return start(c10d::OpType::BROADCAST, "broadcast", tensors, tensors,
                 [&](Tensors&, Tensors& out) { return gloo_->broadcast(out, opts); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    auto sums = opts;
    return start(c10d::OpType::ALLREDUCE, "all_reduce", tensors, tensors,
                 [&](Tensors&, Tensors& out) { return gloo_->allreduce(out, sums); }, average(sums.reduceOp));
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    auto sums = opts;
    return start(c10d::OpType::ALLREDUCE_COALESCED, "all_reduce_coalesced", tensors, tensors,
                 [&](Tensors&, Tensors& out) { return gloo_->allreduce_coalesced(out, sums); },
                 average(sums.reduceOp));
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    auto sums = opts;
    return start(c10d::OpType::REDUCE, "reduce", tensors, tensors,
                 [&](Tensors&, Tensors& out) { return gloo_->reduce(out, sums); }, average(sums.reduceOp));
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return start(c10d::OpType::ALLGATHER, "all_gather", inputs, outputs.at(0), [&](Tensors& in, Tensors& out) {
      std::vector<Tensors> lists{out};
      return gloo_->allgather(lists, in, opts);
    });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    return start(c10d::OpType::_ALLGATHER_BASE, "all_gather_into_tensor", {input}, {output},
                 [&](Tensors& in, Tensors& out) { return gloo_->_allgather_base(out[0], in[0], opts); });
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override {
    auto sums = opts;
    return start(c10d::OpType::REDUCE_SCATTER, "reduce_scatter", inputs.at(0), outputs,
                 [&](Tensors& in, Tensors& out) {
                   std::vector<Tensors> lists{in};
                   return gloo_->reduce_scatter(out, lists, sums);
                 },
                 average(sums.reduceOp));
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override {
    auto sums = opts;
    return start(c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor", {input}, {output},
                 [&](Tensors& in, Tensors& out) { return gloo_->_reduce_scatter_base(out[0], in[0], sums); },
                 average(sums.reduceOp));
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override {
    return start(c10d::OpType::ALLTOALL_BASE, "all_to_all_single", {input}, {output}, [&](Tensors& in, Tensors& out) {
      return gloo_->alltoall_base(out[0], in[0], output_splits, input_splits, opts);
    });
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return start(c10d::OpType::SEND, "send", tensors, {},
                 [&](Tensors& in, Tensors&) { return gloo_->send(in, to, tag); });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return start(c10d::OpType::RECV, "recv", {}, tensors,
                 [&](Tensors&, Tensors& out) { return gloo_->recv(out, from, tag); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    return start(c10d::OpType::BARRIER, "barrier", {}, {}, [&](Tensors&, Tensors&) { return gloo_->barrier(opts); });
  }

 private:
  // NCCL averages; Gloo sums, and the sum is divided when it comes.
  bool average(c10d::ReduceOp& reduction) const {
    if (reduction != c10d::ReduceOp::AVG) return false;
    reduction = c10d::ReduceOp::SUM;
    return true;
  }

  template <typename Collective>
  WorkPtr start(c10d::OpType type, const char* name, const Tensors& inputs, const Tensors& outputs,
                Collective collective, bool average = false) {
    wait_for(stream_, clock_of(current_stream()));
    Operation operation(name, stream_);
    Tensors in = host_copies(operation, inputs, false), out = host_copies(operation, outputs, true), late;
    std::vector<Block*> touched;
    for (auto& tensor : outputs) {
      fill_with_nan(tensor);
      late.push_back(as_cpu(tensor));
      if (Block* block = block_of(tensor)) touched.push_back(block);
    }
    WorkPtr work = collective(in, out);
    int64_t divisor = average ? getSize() : 1;
    operation.postpone({0, 0, false, touched, [work, in, out, late, divisor]() mutable {
                          at::AutoDispatchBelowADInplaceOrView no_autograd;
                          work->wait();
                          for (size_t i = 0; i < out.size(); ++i)
                            late[i].copy_(divisor == 1 ? out[i] : out[i].div_(divisor));
                        }});
    return c10::make_intrusive<GroupWork>(type, stream_, outputs, work, type == c10d::OpType::BARRIER);
  }

  Tensors host_copies(Operation& operation, const Tensors& tensors, bool write) {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    Tensors copies;
    for (auto& tensor : tensors) {
      TORCH_CHECK(tensor.device().type() == kDevice, "standin_nccl: tensors must be on the device, got one on ",
                  tensor.device());
      TORCH_CHECK(tensor.is_contiguous(), "standin_nccl: tensors must be contiguous");
      operation.touches(tensor, write);
      record_stream(tensor.storage().data_ptr(), stream_);
      copies.push_back(as_cpu(tensor).clone());
    }
    return copies;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  StreamId stream_;
};

}  // namespace standin

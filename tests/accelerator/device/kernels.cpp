// Operators of the stand-in accelerator: the CPU's kernels on the accessible mapping.
//
// `at::native::cpu_fallback` would copy every argument to the CPU and back, which loses strides (so that results are
// not the CPU's bit for bit) and writes that a schema does not declare (batch norm's running statistics). Here the
// CPU's kernel gets CPU tensors that alias the device's bytes.
#include "device.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstring>
#include <string_view>

namespace standin {

at::Tensor as_cpu(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  char* data = tensor.device().type() == kDevice ? accessible(storage.data())
                                                 : static_cast<char*>(const_cast<void*>(storage.data()));
  // With an allocator, so that a kernel may resize an output; `Call::finish` then moves the bytes back.
  c10::Storage bytes(c10::Storage::use_byte_size_t(), storage.nbytes(), c10::DataPtr(data, c10::kCPU),
                     c10::GetAllocator(c10::kCPU), /*resizable=*/true);
  auto copy = at::detail::make_tensor<c10::TensorImpl>(std::move(bytes), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                       tensor.dtype());
  copy.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  copy._set_conj(tensor.is_conj());
  copy._set_neg(tensor.is_neg());
  return copy;
}

namespace {

using Stack = torch::jit::Stack;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDevice; }

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  size_t nbytes =
      at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), self.storage_offset());
  if (nbytes > self.storage().nbytes()) grow(self.storage(), nbytes);
  return self;
}

}  // namespace

at::Tensor to_device(const at::Tensor& computed) {
  if (!computed.defined() || computed.device().type() == kDevice) return computed;
  at::Tensor dense = computed.is_non_overlapping_and_dense() ? computed : computed.contiguous();
  at::Tensor result = empty_strided(dense.sizes(), dense.strides(), dense.scalar_type(), {}, {}, {});
  Operation output("output");
  output.writes(result);
  as_cpu(result).copy_(dense);
  return result;
}

namespace {

// One call of a CPU kernel: swaps tensors on the stack for their aliases, and back.
class Call {
 public:
  Call(const c10::FunctionSchema& schema, Stack& stack)
      : schema_(schema), stack_(stack), operation_(schema.name().c_str()), name_(schema.name()) {
    first_ = stack.size() - schema.arguments().size();
    originals_.assign(stack.begin() + first_, stack.end());
    for (size_t i = 0; i < originals_.size(); ++i) stack[first_ + i] = swapped(i);
    // The result's size, or the result itself, is needed on the host: CUDA waits here, too.
    static const std::set<std::string_view> waiting{
        "aten::nonzero", "aten::masked_select", "aten::equal",      "aten::_unique2",          "aten::unique_dim",
        "aten::unique_consecutive", "aten::repeat_interleave", "aten::unique_dim_consecutive", "aten::bincount"};
    if (waiting.count(name_)) synchronize_stream(operation_.stream);
  }

  void finish() {
    for (auto& [original, copy] : aliases_) take_resize(original, copy);
    size_t count = schema_.returns().size();
    for (size_t i = 0; i < count; ++i) {
      auto& value = stack_[stack_.size() - count + i];
      value = returned(schema_.returns()[i].alias_info(), value);
    }
  }

 private:
  bool writes(size_t i) const {
    const auto* info = schema_.arguments()[i].alias_info();
    // The schema does not tell that training writes the running statistics.
    bool statistics = name_ == "aten::native_batch_norm" && (i == 3 || i == 4) && originals_[5].toBool();
    return statistics || (info != nullptr && info->isWrite());
  }

  c10::IValue swapped(size_t i) {
    const auto& argument = schema_.arguments()[i];
    const auto& value = originals_[i];
    const auto& type = *argument.real_type();
    if (value.isTensor()) return swapped(value.toTensor(), writes(i), false);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(swapped(tensor, writes(i), false));
      return list;
    }
    if (value.isOptionalTensorList()) {  // indices, which may be on the CPU as with CUDA
      c10::List<std::optional<at::Tensor>> list;
      for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
        list.push_back(tensor ? std::make_optional(swapped(*tensor, false, true)) : std::nullopt);
      return list;
    }
    if (value.isDevice()) return c10::Device(c10::kCPU);
    if (value.isGenerator()) return cpu_generator(value.toGenerator());
    if (value.isNone() && type.str() == "Generator?") return cpu_generator({});
    return value;
  }

  at::Tensor swapped(const at::Tensor& tensor, bool write, bool index) {
    if (!tensor.defined()) return tensor;
    if (!on_device(tensor)) {
      TORCH_CHECK(index || tensor.dim() == 0, "Expected all tensors to be on the same device, but ", name_, " got a ",
                  tensor.sizes(), " tensor on ", tensor.device(), " beside tensors on standin:0");
      return tensor;
    }
    operation_.touches(tensor, write);
    for (auto& [original, copy] : aliases_)
      if (original.is_same(tensor)) return copy;
    return aliases_.emplace_back(tensor, as_cpu(tensor)).second;
  }

  // A kernel has resized an output: the device's tensor follows.
  void take_resize(const at::Tensor& original, const at::Tensor& copy) {
    bool moved = copy.storage().data() != accessible(original.storage().data());
    if (!moved && copy.sizes() == original.sizes() && copy.strides() == original.strides()) return;
    if (moved) grow(original.storage(), copy.storage().nbytes());
    original.unsafeGetTensorImpl()->set_sizes_and_strides(copy.sizes(), copy.strides(), copy.storage_offset());
    if (moved) as_cpu(original).copy_(copy);
  }

  c10::IValue returned(const at::AliasInfo* info, const c10::IValue& value) {
    if (info != nullptr) {
      TORCH_CHECK(info->isWrite(), "standin: the view operator ", name_, " has no kernel; add one in kernels.cpp");
      for (size_t i = 0; i < originals_.size(); ++i) {
        const auto* argument = schema_.arguments()[i].alias_info();
        if (argument != nullptr && *argument == *info) return originals_[i];
      }
    }
    if (value.isTensor()) return to_device(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(to_device(tensor));
    return list;
  }

  const c10::FunctionSchema& schema_;
  Stack& stack_;
  Operation operation_;
  std::string_view name_;
  size_t first_ = 0;
  std::vector<c10::IValue> originals_;
  std::vector<std::pair<at::Tensor, at::Tensor>> aliases_;
};

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  Call call(op.schema(), *stack);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.finish();
}

void call_instead(const char* name, Stack* stack) {
  fallback(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), stack);
}

void convolution(const c10::OperatorHandle&, Stack* stack) { call_instead("aten::convolution", stack); }

void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  // As `convolution_backward_overrideable`, but with the bias's size after the weight.
  size_t first = stack->size() - 10;
  const auto weight = stack->at(first + 2).toTensor();
  bool transposed = stack->at(first + 6).toBool();
  int64_t outputs = transposed ? weight.size(1) * stack->at(first + 8).toInt() : weight.size(0);
  stack->insert(stack->begin() + first + 3, c10::IValue(c10::List<int64_t>({outputs})));
  call_instead("aten::convolution_backward", stack);
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  // The CPU's kernel would draw from the CPU's generator.
  auto mask = at::ones_like(input, input.options().dtype(at::kBool));
  if (!train.value_or(true)) return {input.clone(), mask};
  mask.bernoulli_(1 - p);
  return {input * mask * (p == 1 ? 0 : 1 / (1 - p)), mask};
}

at::Scalar local_scalar(const at::Tensor& self) {
  Operation item("item");
  item.reads(self);
  synchronize_stream(item.stream);
  return at::_local_scalar_dense(as_cpu(self));
}

bool same_bytes(const at::Tensor& one, const at::Tensor& other) {
  return memcmp(one.const_data_ptr(), other.const_data_ptr(), one.nbytes()) == 0;
}

// The copy is carried out late, from what the pinned source then holds.
void copy_in_late(Operation& copy, const at::Tensor& pinned, const at::Tensor& target) {
  fill_with_nan(target);
  auto seen = std::make_shared<at::Tensor>();
  auto carry_out = [from = as_cpu(pinned), to = as_cpu(target), seen] {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    *seen = from.contiguous().clone();
    to.copy_(*seen);
  };
  // The device needed the copy before the host waited for its end. Until then the source may not change either.
  auto check = [from = as_cpu(pinned), held = pinned.storage(), seen] {
    TORCH_CHECK(same_bytes(from.contiguous(), *seen), "standin: a pinned tensor of ", from.sizes(),
                " was overwritten before its copy to the device had ended. Wait for an event after the copy first.");
  };
  copy.postpone({0, 0, false, {block_of(pinned), block_of(target)}, carry_out, check});
}

// The pinned target gets its values when the host waits, and not before.
void copy_out_late(Operation& copy, const at::Tensor& source, const at::Tensor& pinned) {
  fill_with_nan(pinned);
  auto carry_out = [from = as_cpu(source).clone(), to = as_cpu(pinned), held = pinned.storage()] {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    to.copy_(from);
  };
  copy.postpone({0, 0, true, {block_of(pinned)}, carry_out});
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  if (target.numel() == 0) return target;
  Operation copy("copy");
  copy.reads(source);
  copy.writes(target);
  bool in = !on_device(source), out = !on_device(target);
  bool late = non_blocking && block_of(in ? source : target) != nullptr;
  if (in && late) {
    copy_in_late(copy, source, target);
  } else if (out && late) {
    copy_out_late(copy, source, target);
  } else {
    as_cpu(target).copy_(as_cpu(source));
    // A pageable source is read before the call returns; a pageable target makes the host wait.
    if (out || (in && !non_blocking)) synchronize_stream(copy.stream);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

void record_stream_of(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), stream.id());
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_.source_Storage", [](at::Tensor& self, at::Storage source) -> at::Tensor& {
    return at::cpu::set_(self, source);
  });
  m.impl("set_.source_Storage_storage_offset",
         [](at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
            at::IntArrayRef stride) -> at::Tensor& { return at::cpu::set_(self, source, offset, size, stride); });
  m.impl("set_.source_Tensor", [](at::Tensor& self, const at::Tensor& source) -> at::Tensor& {
    return at::cpu::set_(self, source);
  });
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream_of);
  m.impl("native_dropout", native_dropout);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

}  // namespace standin

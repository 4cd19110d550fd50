// Sparse tensors (COO) of the stand-in accelerator: the CPU's kernels on sparse tensors that alias the device's bytes.
//
// A sparse tensor is a pair of dense ones, its indices and its values. A kernel that replaces them gives new ones.
#include "device.h"

#include <ATen/ATen.h>
#include <ATen/native/SparseTensorUtils.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/values_native.h>
#include <torch/library.h>

#include <string_view>

namespace standin {
namespace {

at::Tensor sparse(const at::Tensor& indices, const at::Tensor& values, const at::Tensor& like) {
  return at::_sparse_coo_tensor_unsafe(indices, values, like.sizes(), values.scalar_type(), at::kSparse,
                                       values.device(), std::nullopt, like.is_coalesced());
}

// One call of a CPU kernel, as in kernels.cpp.
class SparseCall {
 public:
  explicit SparseCall(const c10::FunctionSchema& schema) : schema_(schema), operation_(schema.name().c_str()) {
    // The number of entries of the result is needed on the host: CUDA waits here, too.
    static const std::set<std::string_view> waiting{"aten::_coalesce", "aten::add"};
    if (waiting.count(schema.name())) synchronize_stream(operation_.stream);
  }

  c10::IValue swapped(const c10::IValue& value, size_t i) {
    const auto* info = schema_.arguments()[i].alias_info();
    bool write = info != nullptr && info->isWrite();
    if (value.isTensor()) return swapped(value.toTensor(), write);
    if (value.isDevice()) return c10::Device(c10::kCPU);
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(swapped(tensor, write));
    return list;
  }

  void write_back() {
    for (auto& [original, copy] : written_) {
      auto* impl = at::sparse::get_sparse_impl(original);
      impl->set_indices_and_values_unsafe(to_device(copy._indices()), to_device(copy._values()));
      impl->set_coalesced(copy.is_coalesced());
    }
  }

  c10::IValue returned(const c10::IValue& value, const at::AliasInfo* info, const std::vector<c10::IValue>& given) {
    for (size_t i = 0; info != nullptr && i < given.size(); ++i) {
      const auto* argument = schema_.arguments()[i].alias_info();
      if (argument != nullptr && *argument == *info) return given[i];
    }
    if (!value.isTensor() || !value.toTensor().defined()) return value;
    const at::Tensor& tensor = value.toTensor();
    return tensor.is_sparse() ? sparse(to_device(tensor._indices()), to_device(tensor._values()), tensor)
                              : to_device(tensor);
  }

 private:
  at::Tensor swapped(const at::Tensor& tensor, bool write) {
    if (!tensor.defined() || tensor.device().type() != kDevice) return tensor;
    if (!tensor.is_sparse()) {
      operation_.touches(tensor, write);
      return as_cpu(tensor);
    }
    at::Tensor indices = tensor._indices(), values = tensor._values();
    operation_.reads(indices);
    operation_.touches(values, write);
    at::Tensor copy = sparse(as_cpu(indices), as_cpu(values), tensor);
    if (write) written_.emplace_back(tensor, copy);
    return copy;
  }

  const c10::FunctionSchema& schema_;
  Operation operation_;
  std::vector<std::pair<at::Tensor, at::Tensor>> written_;
};

void sparse_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  const auto& schema = op.schema();
  size_t first = stack->size() - schema.arguments().size();
  std::vector<c10::IValue> given(stack->begin() + first, stack->end());
  SparseCall call(schema);
  for (size_t i = 0; i < given.size(); ++i) (*stack)[first + i] = call.swapped(given[i], i);
  op.callBoxed(stack);
  call.write_back();
  size_t count = schema.returns().size();
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[stack->size() - count + i];
    value = call.returned(value, schema.returns()[i].alias_info(), given);
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&sparse_fallback>());
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("empty.memory_format", at::native::empty_sparse_symint);
  m.impl("_sparse_coo_tensor_with_dims", at::native::new_with_dims_sparse);
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", at::native::new_with_dims_and_tensor_sparse_symint);
  m.impl("sparse_dim", at::native::sparse_dim_sparse);
  m.impl("dense_dim", at::native::dense_dim_sparse);
  m.impl("_nnz", at::native::_nnz_sparse);
  m.impl("_indices", at::native::_indices_sparse);
  m.impl("_values", at::native::_values_sparse);
  m.impl("indices", at::native::indices_sparse);
  m.impl("values", at::native::values_sparse);
  m.impl("is_coalesced", at::native::is_coalesced_sparse);
  m.impl("_coalesced_", at::native::_coalesced_sparse_);
  m.impl("clone", torch::CppFunction::makeFromBoxedFunction<&sparse_fallback>());  // PyTorch's own copies to empty memory
}

}  // namespace standin

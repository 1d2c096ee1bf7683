// Operations that are the device's own: memory, views, copies, and what CUDA has in another form
// than the CPU.
#pragma once

#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/sparse_resize_native.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/values_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>

#include "kernels.h"

namespace gpu {

using Ints = c10::IntArrayRef;
using Maybe = std::optional<Tensor>;
using Format = std::optional<at::MemoryFormat>;
using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Place = std::optional<at::Device>;
using Flag = std::optional<bool>;

// ---- memory

inline Tensor empty(Ints size, Dtype dtype, Layout, Place place, Flag pin, Format format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(place.value_or(c10::Device(kType)));
  constexpr auto keys = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(size, c10::GetAllocator(kType), keys,
                                   c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(Ints size, Ints stride, Dtype dtype, Layout, Place place, Flag pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  auto where = place.value_or(c10::Device(kType));
  return new_tensor(size, stride, c10::dtype_or_default(dtype), number(where.index()));
}

struct NoMemory final : c10::Allocator {
  at::DataPtr allocate(size_t) override { return {nullptr, nullptr, nullptr, device_of(current)}; }
  void copy_data(void*, const void*, size_t) const override {}
};

inline Tensor zero_tensor(Ints size, Dtype dtype, Layout, Place place, Flag) {
  static auto* nothing = new NoMemory;
  c10::DeviceGuard guard(place.value_or(c10::Device(kType)));
  auto keys = c10::DispatchKeySet({c10::DispatchKey::CUDA, c10::DispatchKey::ZeroTensor});
  return at::detail::empty_generic(size, nothing, keys, c10::dtype_or_default(dtype), std::nullopt);
}

inline void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  int device = storage->device().index();
  auto made = take(device, bytes);
  size_t kept = std::min(bytes, storage->nbytes());
  if (kept) {
    Lock lock;
    char *to = behind(made.get()), *from = behind(storage->data());
    launch(queue(device), [=] { std::memcpy(to, from, kept); });
  }
  storage->set_data_ptr_noswap(std::move(made));
  storage->set_nbytes(bytes);
}

inline void grow(const Tensor& t) {
  int64_t last = t.storage_offset();
  for (int64_t n = 0; n < t.dim(); ++n) last += (t.size(n) - 1) * t.stride(n);
  size_t bytes = t.numel() ? (last + 1) * t.itemsize() : 0;
  auto* storage = t.storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) resize_storage(storage, bytes);
}

inline const Tensor& resize_(const Tensor& t, Ints size, Format format) {
  auto* impl = t.unsafeGetTensorImpl();
  if (t.sizes() != size) impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  grow(t);
  return t;
}

inline Tensor& set_part(Tensor& t, at::Storage storage, int64_t offset, Ints size, Ints stride) {
  TORCH_CHECK(storage.device() == t.device(), "Attempted to set the storage of a tensor on device ",
              t.device(), " to a storage on different device ", storage.device(), ".");
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.size() == size.size()) impl->set_sizes_and_strides(size, stride);
  else impl->set_sizes_contiguous(size);
  grow(t);
  return t;
}

inline Tensor& set_whole(Tensor& t, at::Storage storage) {
  int64_t count = storage.nbytes() / t.itemsize();
  return set_part(t, std::move(storage), 0, {count}, {});
}

inline Tensor& set_same(Tensor& t, const Tensor& other) {
  return set_part(t, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

inline Tensor& set_empty(Tensor& t) {
  return set_same(t, empty({0}, t.scalar_type(), {}, t.device(), {}, {}));
}

inline void record_stream(Tensor& t, c10::Stream stream) {
  static_cast<DeviceMemory*>(c10::GetAllocator(kType))
      ->recordStream(t.storage().data_ptr(), stream);
}

// ---- copies

inline bool alike(const Tensor& a, const Tensor& b) {  // copied as one run of bytes
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
      a.strides() == b.strides() && a.is_non_overlapping_and_dense() &&
      a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

// A tensor of the host that a late copy uses. What torch pinned, it keeps until then; what the
// program registered, the program has to keep.
inline Tensor late(const Tensor& host, const Range& range, Queue& queue) {
  if (!range.registered) return host;
  transfer(host.const_data_ptr(), host.nbytes(), queue);
  return at::from_blob(host.data_ptr(), host.sizes(), host.strides(),
                       at::TensorOptions(at::kCPU).dtype(host.scalar_type()));
}

inline void copy_across(const Tensor& to, const Tensor& from) {  // both wait for each other
  Queue &source = queue(from.device().index()), &target = queue(to.device().index());
  wait_for(source, target, target.asked);
  launch_copy(source, to, lowered(from));
  wait_for(target, source, source.asked);
}

inline void copy_up(const Tensor& to, const Tensor& from, bool later) {
  Queue& on = queue(to.device().index());
  const Range* range = later && alike(from, to) ? pinned_at(from.const_data_ptr()) : nullptr;
  if (range) {
    Tensor source = late(from, *range, on);
    launch_copy(on, to, source);
    if (range->registered) transfers().back().position = on.asked;
    return;
  }
  Tensor source;
  {
    Plain plain;
    source = from.clone();  // other memory is read before the call returns
  }
  launch_copy(on, to, source);
  if (!later) wait(on);
}

inline void copy_down(const Tensor& to, const Tensor& from, bool later) {
  Queue& on = queue(from.device().index());
  const Range* range = later && alike(from, to) ? pinned_at(to.const_data_ptr()) : nullptr;
  Tensor target = range ? late(to, *range, on) : to, source = lowered(from);
  launch(on, [target, source]() mutable { target.copy_(source); });
  if (!range) wait(on);
  else if (range->registered) transfers().back().position = on.asked;
}

inline Tensor& copy_(Tensor& to, const Tensor& from, bool later) {
  if (to.is_same(from) || to.numel() == 0) return to;
  Lock lock;
  bool crosses = to.device() != from.device();
  state().crossings += crosses;
  Tensor source = from.expand_as(to);
  if (!crosses) launch_copy(queue(to.device().index()), to, lowered(source));
  else if (ours(to) && ours(from)) copy_across(to, source);
  else if (ours(to)) copy_up(to, source, later);
  else copy_down(to, source, later);
  return to;
}

// One kernel where all lies on one device, in one dtype; else one copy for each.
inline void foreach_copy_(at::TensorList into, at::TensorList from, bool later) {
  TORCH_CHECK(into.size() == from.size(), "Tensor lists must have the same number of tensors");
  bool one = true;
  for (size_t n = 0; n < into.size(); ++n)
    one = one && into[n].device() == into[0].device() && from[n].device() == into[0].device() &&
        into[n].scalar_type() == into[0].scalar_type() && alike(into[n], from[n]);
  if (!one) {
    for (size_t n = 0; n < into.size(); ++n) {
      Tensor target = into[n];
      target.copy_(from[n], later);
    }
    return;
  }
  const auto type = into[0].scalar_type();
  for (auto lacking : {at::kUInt16, at::kUInt32, at::kUInt64, at::kComplexHalf})
    TORCH_CHECK_NOT_IMPLEMENTED(type != lacking, "\"foreach_tensor_copy\" not implemented for '",
                                toString(type), "'");
  Lock lock;
  std::vector<Tensor> targets, sources;
  for (const Tensor& t : into) targets.push_back(lowered(t));
  for (const Tensor& t : from) sources.push_back(lowered(t));
  launch(queue(into[0].device().index()), [targets, sources] {
    for (size_t n = 0; n < targets.size(); ++n) Tensor(targets[n]).copy_(sources[n]);
  });
}

inline at::Scalar item(const Tensor& t) {
  Lock lock;
  wait(queue(t.device().index()));
  Plain plain;
  return lowered(t).item();
}

// ---- convolution: torch chooses other operations for CUDA, in parts that the CPU lacks

inline void same_place(std::initializer_list<Tensor> all) {
  const Tensor& first = *all.begin();
  for (const Tensor& t : all)
    TORCH_CHECK(!t.defined() || t.device() == first.device(), "Expected all tensors to be on the "
                "same device, but found at least two devices, ", first.device(), " and ", t.device(),
                "!");
}

inline at::MemoryFormat format_of(const Tensor& x, const Tensor& weight) {
  auto one = x.suggest_memory_format(), other = weight.suggest_memory_format();
  return one == at::MemoryFormat::Contiguous ? other : one;
}

inline Tensor low(const Tensor& t) { return t.defined() ? lowered(t) : t; }

// Nothing if the arguments do not fit, which the CPU's kernel says.
inline std::vector<int64_t> out_sizes(const Tensor& x, const Tensor& weight, Ints stride,
                                      Ints padding, Ints dilation, bool transposed,
                                      Ints output_padding, int64_t groups) {
  bool fits = x.dim() == weight.dim() && x.dim() > 2 &&
      x.size(1) == (transposed ? weight.size(0) : weight.size(1) * groups);
  if (!fits) return {};
  std::vector<int64_t> sizes{x.size(0), transposed ? weight.size(1) * groups : weight.size(0)};
  auto at = [](Ints of, size_t n) { return of.size() == 1 ? of[0] : of[n]; };
  for (int64_t n = 0; n + 2 < x.dim(); ++n) {
    int64_t reach = at(dilation, n) * (weight.size(n + 2) - 1) + 1, in = x.size(n + 2);
    if (!transposed && in + 2 * at(padding, n) < reach) return {};
    sizes.push_back(transposed ? (in - 1) * at(stride, n) - 2 * at(padding, n) + reach +
                                     at(output_padding, n)
                               : (in + 2 * at(padding, n) - reach) / at(stride, n) + 1);
  }
  return sizes;
}

inline Tensor convolution(const Tensor& x, const Tensor& weight, const Maybe& bias, Ints stride,
                          Ints padding, Ints dilation, bool transposed, Ints output_padding,
                          int64_t groups) {
  Tensor b = bias.value_or(Tensor());
  same_place({x, weight, b});
  auto sizes = out_sizes(x, weight, stride, padding, dilation, transposed, output_padding, groups);
  if (sizes.empty()) return raised(at::convolution(lowered(x), lowered(weight), low(b), stride, padding,
                                   dilation, transposed, output_padding, groups), x.device().index());
  Tensor out = empty(sizes, x.scalar_type(), {}, x.device(), {}, format_of(x, weight));
  Lock lock;
  launch(queue(x.device().index()), [=, to = lowered(out), x = lowered(x), w = lowered(weight),
                                     b = low(b), s = stride.vec(),
                                     p = padding.vec(), d = dilation.vec(),
                                     o = output_padding.vec()]() mutable {
    to.copy_(at::convolution(x, w, b, s, p, d, transposed, o, groups));
  });
  return out;
}

using Three = std::tuple<Tensor, Tensor, Tensor>;

inline Three convolution_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                  c10::OptionalArrayRef<int64_t> bias_sizes, Ints stride,
                                  Ints padding, Ints dilation, bool transposed,
                                  Ints output_padding, int64_t groups, std::array<bool, 3> mask) {
  same_place({grad, x, weight});
  auto format = format_of(x, weight);
  auto made = [&](Ints size, at::MemoryFormat format) {
    return empty(size, grad.scalar_type(), {}, grad.device(), {}, format);
  };
  int64_t channels = weight.size(transposed ? 1 : 0) * (transposed ? groups : 1);
  Three out{mask[0] ? made(x.sizes(), format) : Tensor(),
            mask[1] ? made(weight.sizes(), format) : Tensor(),
            mask[2] ? made({channels}, at::MemoryFormat::Contiguous) : Tensor()};
  Lock lock;
  launch(queue(grad.device().index()),
         [=, to = std::vector<Tensor>{low(std::get<0>(out)), low(std::get<1>(out)),
                                      low(std::get<2>(out))},
          g = lowered(grad), x = lowered(x), w = lowered(weight), s = stride.vec(),
          p = padding.vec(), d = dilation.vec(), o = output_padding.vec()]() mutable {
           int64_t sizes[] = {channels};
           auto [a, b, c] = at::convolution_backward(g, x, w, Ints(sizes), s, p, d, transposed, o,
                                                     groups, mask);
           if (mask[0]) to[0].copy_(a);
           if (mask[1]) to[1].copy_(b);
           if (mask[2]) to[2].copy_(c);
         });
  return out;
}

// ---- cells of recurrent layers, which CUDA has as one operation each

inline Tensor with_biases(Tensor gates, const Maybe& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

inline Three lstm_cell(const Tensor& from_input, const Tensor& from_hidden, const Tensor& cx,
                       const Maybe& input_bias, const Maybe& hidden_bias) {
  same_place({from_input, from_hidden, cx});
  Tensor gates = with_biases(with_biases(from_input + from_hidden, input_bias), hidden_bias);
  auto parts = gates.chunk(4, 1);
  Tensor in = parts[0].sigmoid(), forget = parts[1].sigmoid(), cell = parts[2].tanh(),
         out = parts[3].sigmoid();
  Tensor cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

inline Three lstm_cell_backward(const Maybe& grad_hy, const Maybe& grad_cy, const Tensor& cx,
                                const Tensor& cy, const Tensor& workspace, bool has_bias) {
  auto parts = workspace.chunk(4, 1);
  const Tensor &in = parts[0], &forget = parts[1], &cell = parts[2], &out = parts[3];
  Tensor gh = grad_hy && grad_hy->defined() ? *grad_hy : at::zeros_like(cx);
  Tensor gc = grad_cy && grad_cy->defined() ? *grad_cy : at::zeros_like(cx);
  Tensor tanh = cy.tanh();
  gc = gc + gh * out * (1 - tanh * tanh);
  Tensor gates = at::cat({gc * cell * in * (1 - in), gc * cx * forget * (1 - forget),
                          gc * in * (1 - cell * cell), gh * tanh * out * (1 - out)}, 1);
  return {gates, gc * forget, has_bias ? gates.sum(0) : Tensor()};
}

inline std::tuple<Tensor, Tensor> gru_cell(const Tensor& from_input, const Tensor& from_hidden,
                                           const Tensor& hx, const Maybe& input_bias,
                                           const Maybe& hidden_bias) {
  same_place({from_input, from_hidden, hx});
  auto i = with_biases(from_input, input_bias).chunk(3, 1);
  auto h = with_biases(from_hidden, hidden_bias).chunk(3, 1);
  Tensor reset = (i[0] + h[0]).sigmoid(), update = (i[1] + h[1]).sigmoid();
  Tensor fresh = (i[2] + reset * h[2]).tanh();
  return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, h[2]}, 1)};
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad, const Tensor& workspace, bool has_bias) {
  auto parts = workspace.chunk(5, 1);
  const Tensor &reset = parts[0], &update = parts[1], &fresh = parts[2], &hx = parts[3];
  Tensor g_fresh = grad * (1 - update) * (1 - fresh * fresh);
  Tensor g_update = grad * (hx - fresh) * update * (1 - update);
  Tensor g_reset = g_fresh * parts[4] * reset * (1 - reset);
  Tensor input = at::cat({g_reset, g_update, g_fresh}, 1);
  Tensor hidden = at::cat({g_reset, g_update, g_fresh * reset}, 1);
  return {input, hidden, grad * update, has_bias ? input.sum(0) : Tensor(),
          has_bias ? hidden.sum(0) : Tensor()};
}

inline int64_t plain_attention(const Tensor&, const Tensor&, const Tensor&, const Maybe&, double,
                               bool, std::optional<double>, bool) {
  return 0;  // as products and a softmax
}

inline bool no_other_loss(const Tensor&, const Tensor&, Ints, Ints, int64_t) { return false; }
inline bool no_other_loss_of(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t) {
  return false;
}

}  // namespace gpu

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&gpu::fallback>());
}
TORCH_LIBRARY_IMPL(_, SparseCUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&gpu::fallback>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", gpu::empty);
  m.impl("empty_strided", gpu::empty_strided);
  m.impl("_efficientzerotensor", gpu::zero_tensor);
  m.impl("resize_", gpu::resize_);
  m.impl("set_", gpu::set_empty);
  m.impl("set_.source_Storage", gpu::set_whole);
  m.impl("set_.source_Storage_storage_offset", gpu::set_part);
  m.impl("set_.source_Tensor", gpu::set_same);
  m.impl("record_stream", gpu::record_stream);
  m.impl("as_strided", [](const gpu::Tensor& t, gpu::Ints size, gpu::Ints stride,
                          std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(t, size, stride, offset);
  });
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("copy_", gpu::copy_);
  m.impl("_foreach_copy_", gpu::foreach_copy_);
  m.impl("_local_scalar_dense", gpu::item);
  // Not by torch's kernels for all devices, which may grow, or add in another order than the CPU's.
  for (auto* one : {"abs", "where.self", "native_layer_norm"})
    m.impl(one, torch::CppFunction::makeFromBoxedFunction<&gpu::fallback>());
  m.impl("convolution", gpu::convolution);
  m.impl("convolution_backward", gpu::convolution_backward);
  m.impl("_thnn_fused_lstm_cell", gpu::lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", gpu::lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gpu::gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gpu::gru_cell_backward);
  for (std::string one : {"_use_cudnn_ctc_loss", "_use_miopen_ctc_loss"}) {
    m.impl(one.c_str(), gpu::no_other_loss);
    m.impl((one + ".Tensor").c_str(), gpu::no_other_loss_of);
  }
  m.impl("_fused_sdp_choice", gpu::plain_attention);
}

namespace gpu {

// A kernel of torch's that makes something on the current device: let that be the one it is given.
template <auto> struct Placed;
template <class Result, class... Args, Result (*kernel)(Args...)>
struct Placed<kernel> {
  static Result call(Args... args) {
    c10::OptionalDeviceGuard guard;
    auto choose = [&](const auto& one) {
      if constexpr (std::is_same_v<decltype(one), const Place&>)
        if (one) guard.reset_device(*one);
    };
    (choose(args), ...);
    return kernel(args...);
  }
};

}  // namespace gpu

TORCH_LIBRARY_IMPL(aten, SparseCUDA, m) {
  m.impl("empty.memory_format", gpu::Placed<at::native::empty_sparse>::call);
  m.impl("_sparse_coo_tensor_with_dims", gpu::Placed<at::native::new_with_dims_sparse>::call);
  m.impl("_sparse_coo_tensor_with_dims_and_tensors",
         gpu::Placed<at::native::new_with_dims_and_tensor_sparse_symint>::call);
  m.impl("sparse_resize_", at::native::sparse_resize_);
  m.impl("sparse_dim", at::native::sparse_dim_sparse);
  m.impl("dense_dim", at::native::dense_dim_sparse);
  m.impl("_nnz", at::native::_nnz_sparse);
  m.impl("is_coalesced", at::native::is_coalesced_sparse);
  m.impl("_coalesced_", at::native::_coalesced_sparse_);
  m.impl("indices", at::native::indices_sparse);
  m.impl("values", at::native::values_sparse);
  m.impl("_indices", at::native::_indices_sparse);
  m.impl("_values", at::native::_values_sparse);
}

namespace gpu {

// Operations on sparse tensors for which torch would take a kernel for all devices, which is not
// for these.
inline void finish_sparse() {
  constexpr auto key = c10::DispatchKey::SparseCUDA;
  static auto* sparse = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (op && op->hasKernelForDispatchKey(c10::DispatchKey::SparseCPU) &&
        !op->hasKernelForDispatchKey(key) && name.name.rfind("aten::", 0) == 0)
      sparse->impl(toString(name).c_str() + 6,
                   torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace gpu

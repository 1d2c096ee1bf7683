// Kernels: those of the CPU, on the device's memory, when their stream gets there.
//
// An operation of torch gives its outputs at once, of which only the form is known: torch's kernels
// for "meta" say it, or a table here. Those whose outputs depend on values wait, as CUDA's do. What
// has no known form is computed as it is asked for, and seen when its stream gets there.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ExpandUtils.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/native/TypeProperties.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/result_type.h>
#include <ATen/ops/zeros.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/Reduction.h>
#include <ATen/TensorOperators.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <cstdio>
#include <cstring>

#include "runtime.h"

namespace gpu {

using at::IValue;
using at::Tensor;
using Stack = torch::jit::Stack;
using Change = std::function<Tensor(const Tensor&)>;

inline bool ours(const Tensor& t) { return t.defined() && t.device().type() == kType; }

inline Tensor new_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                         int device) {
  c10::DeviceGuard guard(device_of(device));
  constexpr auto keys = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(kType), keys, dtype);
}

// The thread that waits has switches of its own, which are not those of the kernel.
struct Plain {
  c10::impl::ForceDispatchKeyGuard keys{
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset |
          c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView)};
};

inline at::SparseTensorImpl* sparse(const Tensor& t) {
  return static_cast<at::SparseTensorImpl*>(t.unsafeGetTensorImpl());
}

// The same bytes as a tensor of the CPU, for a kernel.
inline Tensor lowered(const Tensor& t) {
  Plain plain;
  auto options = at::TensorOptions(at::kCPU).dtype(t.scalar_type());
  if (t.is_sparse()) {
    auto* impl = sparse(t);
    Tensor indices = lowered(impl->indices()), values = lowered(impl->values());
    return at::_sparse_coo_tensor_unsafe(indices, values, t.sizes(), options, t.is_coalesced());
  }
  if (t._is_zerotensor()) return at::zeros(t.sizes(), options);
  const void* at = t.storage().data();
  Tensor made = at && t.numel()
      ? at::from_blob(behind(t.const_data_ptr()), t.sizes(), t.strides(), options)
      : at::empty_strided(t.sizes(), t.strides(), options);
  made._set_conj(t.is_conj());
  made._set_neg(t.is_neg());
  return made;
}

inline void launch(Queue& queue, std::function<void()> kernel) {
  check_whole();
  std::string untaken;
  untaken.swap(state().untaken);
  TORCH_CHECK(untaken.empty(), "CUDA error: ", untaken);
  ++state().launches;
  queue.add([kernel = std::move(kernel)] {
    Plain plain;
    kernel();
  });
}

inline void launch_copy(Queue& queue, const Tensor& target, const Tensor& source) {
  launch(queue, [to = lowered(target), source]() mutable { to.copy_(source); });
}

// A tensor of the device that will have these values.
inline Tensor raised(const Tensor& t, int device) {
  if (t.is_sparse()) {
    Plain plain;
    auto* impl = sparse(t);
    auto options = at::TensorOptions(device_of(device)).dtype(t.scalar_type());
    return at::_sparse_coo_tensor_unsafe(raised(impl->indices(), device),
                                         raised(impl->values(), device), t.sizes(), options,
                                         t.is_coalesced());
  }
  Tensor made = new_tensor(t.sizes(), t.strides(), t.scalar_type(), device);
  launch_copy(queue(device), made, t);
  return made;
}

inline IValue changed(const IValue& value, const Change& change) {
  if (value.isTensor()) return value.toTensor().defined() ? change(value.toTensor()) : value;
  if (value.isTensorList()) {
    std::vector<Tensor> made;
    for (const Tensor& t : value.toTensorVector()) made.push_back(t.defined() ? change(t) : t);
    return made;
  }
  if (value.isList() && value.toList().elementType()->isSubtypeOf(c10::OptionalType::ofTensor())) {
    c10::List<std::optional<Tensor>> made;
    for (const IValue& one : value.toListRef())
      made.push_back(one.isNone() ? std::nullopt : std::make_optional(change(one.toTensor())));
    return made;
  }
  if (value.isDevice() && value.toDevice().type() == kType) return c10::Device(at::kCPU);
  return value;
}

inline Tensor form(at::IntArrayRef sizes, at::ScalarType dtype,
                   at::MemoryFormat format = at::MemoryFormat::Contiguous) {
  return at::detail::empty_meta(sizes, dtype, std::nullopt, std::nullopt, std::nullopt, format);
}

// Operations without a kernel for "meta", of which each output looks like an argument, by number.
inline const std::vector<int>& looks_like(const std::string& name) {
  static const auto* table = [] {
    auto* made = new std::map<std::string, std::vector<int>>{
        {"abs", {0}}, {"neg", {0}}, {"relu", {0}}, {"hardtanh", {0}}, {"hardswish", {0}},
        {"_prelu_kernel", {0}}, {"_prelu_kernel_backward", {1, 1}}, {"log_sigmoid_forward", {0, 0}},
        {"native_layer_norm_backward", {1, 5, 6}}};
    for (auto* one : {"hardtanh", "hardswish", "log_sigmoid", "glu", "smooth_l1_loss", "mse_loss",
                      "huber_loss", "binary_cross_entropy", "nll_loss2d", "multi_margin_loss",
                      "multilabel_margin_loss", "replication_pad2d", "replication_pad3d",
                      "reflection_pad2d", "max_pool3d_with_indices", "_adaptive_avg_pool2d",
                      "_adaptive_avg_pool3d", "col2im", "im2col", "max_unpool2d"})
      (*made)[std::string(one) + "_backward"] = {1};
    return made;
  }();
  static const std::vector<int> none;
  auto found = table->find(name);
  return found == table->end() ? none : found->second;
}

// The forms of outputs, of operations without a kernel for "meta"; nothing if they are not known.
inline std::vector<Tensor> known_forms(const std::string& full, const Stack& args) {
  const std::string name = full.substr(6);  // without "aten::"
  auto arg = [&](size_t n) { return args.at(n).isTensor() ? args[n].toTensor() : Tensor(); };
  auto dtype = [&] { return arg(0).scalar_type(); };
  std::vector<Tensor> made;
  for (int n : looks_like(name)) {
    if (name == "abs" && arg(0).is_complex()) return {};
    made.push_back(arg(n));
  }
  if (name == "dot" || name == "vdot") made = {form({}, dtype())};
  if (name == "binary_cross_entropy" || name == "huber_loss") {
    bool summed = args[name == "huber_loss" ? 2 : 3].toInt() != at::Reduction::None;
    made = {summed ? form({}, dtype()) : arg(0)};
  }
  if (name == "nll_loss2d_forward") {
    bool summed = args[3].toInt() != at::Reduction::None;
    made = {form(summed ? at::IntArrayRef{} : arg(1).sizes(), dtype()), form({}, dtype())};
  }
  if (name == "where" && args.size() == 3) {
    auto sizes = at::infer_size(at::infer_size(arg(0).sizes(), arg(1).sizes()), arg(2).sizes());
    made = {form(sizes, at::result_type(arg(1), arg(2)))};
  }
  if (name == "index_select" && args.size() == 3 && arg(0).dim()) {
    auto sizes = arg(0).sizes().vec();
    sizes.at(at::maybe_wrap_dim(args[1].toInt(), arg(0).dim())) = arg(2).numel();
    made = {form(sizes, dtype())};
  }
  if (name == "embedding_dense_backward")
    made = {form({args[2].toInt(), arg(0).size(-1)}, dtype())};
  if (name == "native_layer_norm" && !at::isReducedFloatingType(dtype())) {
    auto sizes = arg(0).sizes().vec();
    std::fill(sizes.end() - args[1].toIntVector().size(), sizes.end(), 1);
    made = {form(arg(0).sizes(), dtype()), form(sizes, dtype()), form(sizes, dtype())};
  }
  if (name == "native_batch_norm" && !at::isReducedFloatingType(dtype())) {
    auto each = form({args[5].toBool() ? arg(0).size(1) : 0}, dtype());
    made = {arg(0), each, each};
  }
  if (name == "native_batch_norm_backward") {
    auto each = form({arg(1).size(1)}, dtype());
    made = {arg(1), each, each};
  }
  if (name == "native_group_norm_backward") {
    auto each = form({args[6].toInt()}, dtype());
    made = {arg(1), each, each};
  }
  if (name == "_adaptive_avg_pool2d" || name == "_adaptive_avg_pool3d") {
    auto sizes = arg(0).sizes().vec();
    auto wanted = args[1].toIntVector();
    if (sizes.size() <= wanted.size()) return {};
    std::copy(wanted.begin(), wanted.end(), sizes.end() - wanted.size());
    made = {form(sizes, dtype(), arg(0).suggest_memory_format())};
  }
  if (!args.empty() && args.back().isBoolList() && made.size() == args.back().toBoolList().size())
    for (size_t n = 0; n < made.size(); ++n)  // which gradients are wanted
      if (!args.back().toBoolList()[n]) made[n] = Tensor();
  return made;
}

// One call of an operation.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), schema_(op.schema()), count_(schema_.arguments().size()),
        args_(stack->end() - count_, stack->end()) {
    find_device();
    for (size_t n = 0; n < count_; ++n)
      if (schema_.arguments()[n].name() == "generator" && !random()) random_ = n;
    draws_ = random() || op_.hasTag(at::Tag::nondeterministic_seeded);
  }

  void run(Stack* stack) {
    Lock lock;
    bool waits = op_.hasTag(at::Tag::data_dependent_output) ||
        op_.hasTag(at::Tag::dynamic_output_shape);
    if (waits || sparse_ || !forms()) now(waits);
    else later();
    torch::jit::drop(*stack, count_);
    for (IValue& one : results_) stack->push_back(std::move(one));
  }

 private:
  bool random() const { return random_ < count_; }
  bool written(size_t n) const {
    auto* alias = schema_.arguments()[n].alias_info();
    return alias && alias->isWrite();
  }
  const std::string& name() const { return schema_.name(); }

  // All on one device, but for numbers, and for indices, which may lie on the host.
  void find_device() {
    bool indexes = name().find("index") != std::string::npos && name() != "aten::index_select";
    auto fits = [&](c10::Device where) {
      TORCH_CHECK(device_ < 0 || (where.type() == kType && where.index() == device_),
                  "Expected all tensors to be on the same device, but found at least two devices, ",
                  device_of(device_), " and ", where, "! (when checking arguments of ", name(), ")");
    };
    std::vector<c10::Device> others;
    for (const IValue& arg : args_)
      changed(arg, [&](const Tensor& t) {
        sparse_ = sparse_ || t.is_sparse();
        if (ours(t)) {
          fits(t.device());
          device_ = t.device().index();
        } else if (t.dim() > 0 && !(indexes && &arg != &args_[0]) && name() != "aten::copy_") {
          others.push_back(t.device());
        }
        return t;
      });
    if (device_ >= 0)
      for (auto& other : others) fits(other);
    for (const IValue& arg : args_)
      if (device_ < 0 && arg.isDevice() && arg.toDevice().type() == kType)
        device_ = number(arg.toDevice().index());
    device_ = number(device_);
  }

  // Finds the outputs' forms; false if they are not known.
  bool forms() {
    const auto& returns = schema_.returns();
    // Its kernel compares sizes, which CUDA does as it is called.
    if (name().find("fractional_max_pool") != std::string::npos) return trace();
    bool known = op_.hasKernelForDispatchKey(c10::DispatchKey::Meta) ||
        op_.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
    bool in_place = !returns.empty() || name().back() == '_';
    for (auto& one : returns) in_place = in_place && one.alias_info() && one.alias_info()->isWrite();
    in_place = in_place && name().back() == '_';
    if (known) {
      if (!forms_by_meta()) return false;
    } else if (!in_place && !forms_by_table()) {
      return trace();
    }
    for (size_t n = 0; n < returns.size(); ++n) {
      auto* alias = returns[n].alias_info();
      if (alias && alias->isWrite()) {
        for (size_t m = 0; m < count_; ++m)
          if (written(m) && *schema_.arguments()[m].alias_info() == *alias)
            results_.push_back(args_[m]);
        if (results_.size() != n + 1) return trace();
      } else {
        TORCH_CHECK(!alias, "the stand-in GPU has no view ", name());
        results_.push_back(changed(shapes_[n], [&](const Tensor& t) {
          if (t.is_non_overlapping_and_dense())
            return new_tensor(t.sizes(), t.strides(), t.scalar_type(), device_);
          auto plain = form(t.sizes(), t.scalar_type());
          return new_tensor(t.sizes(), plain.strides(), t.scalar_type(), device_);
        }));
        if (!results_.back().isTensor() && !results_.back().isTensorList()) return trace();
      }
    }
    return true;
  }

  bool forms_by_meta() {
    auto meta = [](const Tensor& t) -> Tensor {
      if (!ours(t) && t.dim() == 0) return t;
      return at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type());
    };
    Stack stack;
    for (const IValue& arg : args_) {
      IValue one = changed(arg, meta);
      stack.push_back(one.isDevice() ? IValue(c10::Device(at::kMeta)) : one);
    }
    Stack before = stack;
    try {
      Plain plain;
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    } catch (const std::exception& e) {
      return trace(e.what());  // the CPU's kernel says it in the usual words
    }
    for (size_t n = 0; n < count_; ++n)  // an output that has to grow
      if (written(n) && before[n].isTensor() && args_[n].toTensor().defined() &&
          before[n].toTensor().sizes() != args_[n].toTensor().sizes())
        return trace();
    shapes_ = std::move(stack);
    return true;
  }

  bool forms_by_table() {
    Stack inputs, outs;
    for (size_t n = 0; n < count_; ++n)
      (schema_.arguments()[n].is_out() ? outs : inputs).push_back(args_[n]);
    for (auto& form : known_forms(name(), inputs)) shapes_.push_back(form);
    for (size_t n = 0; n < outs.size() && n < shapes_.size(); ++n)  // one that has to grow
      if (outs[n].toTensor().sizes() != shapes_[n].toTensor().sizes()) return false;
    return !shapes_.empty();
  }

  bool trace(const char* why = "") {
    static const bool on = std::getenv("STANDIN_TRACE") != nullptr;
    if (on)
      std::fprintf(stderr, "no form: %s %.200s\n", toString(schema_.operator_name()).c_str(), why);
    results_.clear();
    return false;
  }

  // The arguments as a kernel of the CPU gets them: numbers are copied as it is launched.
  Stack arguments() {
    Stack made;
    for (const IValue& arg : args_)
      made.push_back(changed(arg, [](const Tensor& t) {
        if (ours(t)) return lowered(t);
        Plain plain;
        Tensor copy = t.clone();
        if (t.unsafeGetTensorImpl()->is_wrapped_number())
          copy.unsafeGetTensorImpl()->set_wrapped_number(true);
        return copy;
      }));
    return made;
  }

  // What runs the kernel. Random numbers are those of the device's generator, now.
  std::function<void(Stack&)> kernel() {
    auto op = op_;
    if (!draws_)
      return [op](Stack& stack) { op.callBoxed(&stack); };
    at::Generator from = generator(device_);
    if (random() && args_[random_].isGenerator()) from = args_[random_].toGenerator();
    TORCH_CHECK(from.device().type() == kType, "Expected a 'cuda' device type for generator but "
                "found '", from.device().type(), "'");
    uint64_t seed;
    {
      std::lock_guard<std::mutex> hold(from.mutex());
      seed = from.get<Generator>()->draw();
    }
    if (random())
      return [op, seed, n = random_](Stack& stack) {
        stack[n] = at::detail::createCPUGenerator(seed);
        op.callBoxed(&stack);
      };
    return [op, seed](Stack& stack) {
      at::Generator host = at::detail::getDefaultCPUGenerator();
      Tensor before = host.get_state();
      host.set_current_seed(seed);
      struct Back {
        at::Generator host;
        Tensor state;
        ~Back() { host.set_state(state); }
      } back{host, before};
      op.callBoxed(&stack);
    };
  }

  void later() {
    Stack targets;
    for (size_t n = 0; n < results_.size(); ++n)
      targets.push_back(schema_.returns()[n].alias_info() ? IValue() : changed(results_[n], lowered));
    std::vector<std::pair<size_t, Tensor>> outs;  // as a kernel may use them for more on its way
    for (size_t n = 0; n < count_; ++n)
      if (schema_.arguments()[n].is_out() && args_[n].isTensor() && ours(args_[n].toTensor()))
        outs.emplace_back(n, lowered(args_[n].toTensor()));
    launch(queue(device_), [kernel = kernel(), args = arguments(), targets, outs]() mutable {
      for (auto& [n, out] : outs) args[n] = at::empty_like(out);
      auto made = args;
      kernel(args);
      for (auto& [n, out] : outs) out.copy_(made[n].toTensor());
      for (size_t n = 0; n < targets.size(); ++n) {
        if (targets[n].isTensor()) put(targets[n].toTensor(), args[n].toTensor());
        if (!targets[n].isTensorList()) continue;
        auto into = targets[n].toTensorVector(), values = args[n].toTensorVector();
        for (size_t m = 0; m < into.size(); ++m) put(into[m], values[m]);
      }
    });
  }

  static void put(const Tensor& into, const Tensor& value) {
    if (into.defined() && value.defined()) into.copy_(value);
  }

  void now(bool waits) {
    Queue& queue = gpu::queue(device_);
    if (waits) wait(queue);
    else queue.finish(queue.asked);
    check_whole();
    Stack values = arguments();
    std::vector<std::pair<Tensor, Tensor>> outputs;  // of the device, and what they become
    {
      Plain plain;
      for (size_t n = 0; n < count_; ++n) {
        if (!written(n)) continue;
        values[n] = changed(args_[n], [&](const Tensor& t) {
          if (!ours(t)) return t;
          outputs.emplace_back(t, lowered(t).clone());  // a kernel may give it another size
          return outputs.back().second;
        });
      }
      run_now(values);
    }
    for (auto& [target, value] : outputs) store(target, value);
    results_.clear();
    for (size_t n = 0; n < schema_.returns().size(); ++n) {
      auto* alias = schema_.returns()[n].alias_info();
      if (alias && alias->isWrite()) {
        for (size_t m = 0; m < count_; ++m)
          if (written(m) && *schema_.arguments()[m].alias_info() == *alias)
            results_.push_back(args_[m]);
      } else {
        TORCH_CHECK(!alias, "the stand-in GPU has no view ", name());
        results_.push_back(changed(values[n], [&](const Tensor& t) { return raised(t, device_); }));
      }
    }
  }

  void run_now(Stack& values) {
    try {
      kernel()(values);
    } catch (const c10::Error& e) {
      std::string text = e.what_without_backtrace();
      if (text.find("out of range") == std::string::npos &&
          text.find("out of bounds") == std::string::npos)
        throw;
      state().failed = text;  // a kernel of CUDA would have found that
      check_whole();
    }
  }

  void store(const Tensor& target, const Tensor& value) {
    if (target.is_sparse()) {
      auto* impl = sparse(target);
      auto* from = sparse(value);
      impl->raw_resize_(from->sparse_dim(), from->dense_dim(), value.sizes());
      impl->set_indices_and_values_unsafe(raised(from->indices(), device_),
                                          raised(from->values(), device_));
      impl->set_coalesced(from->coalesced());
      return;
    }
    if (target.sizes() != value.sizes()) target.resize_(value.sizes());
    launch_copy(queue(device_), target, value);
  }

  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  const size_t count_;
  Stack args_, shapes_, results_;
  int device_ = -1;
  bool sparse_ = false, draws_ = false;
  size_t random_ = SIZE_MAX;
};

inline void fallback(const c10::OperatorHandle& op, Stack* stack) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
          op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU) ||
          op.hasComputedKernelForDispatchKey(c10::DispatchKey::SparseCPU),
      "the stand-in GPU has no kernel of ", op.schema().operator_name());
  Call(op, stack).run(stack);
}

}  // namespace gpu

// The operator layer: the device kernels that torch_npu registered are replaced by one boxed kernel, which views the
// device's memory as CPU tensors and calls the same operator there. The CPU kernel is the reference; operators of
// torch_npu itself get theirs from the Python files beside. While a stream captures, or its work is deferred, the call
// is recorded as a closure over raw addresses, its result shapes are found with harmless stand-ins, and nothing runs.
//
// Strict: an operator without a reference kernel fails with its name, and so does everything that a rule forbids.
#include <ATen/ATen.h>
#include <ATen/ops/_to_copy_native.h>

#include <cstring>
#include <set>

#include "packed.h"

namespace {

const std::set<std::string> kProducts = {"aten::linear", "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm",
                                         "aten::matmul", "npu::npu_linear"};

// Run an operator on the host. Matrix products of half precision are computed in double and rounded once: the result of
// a row then does not depend on how many rows are beside it. A device accumulates in float32, in an order it chooses.
void call_on_host(const OperatorHandle& op, const std::string& name, Stack& stack) {
  std::optional<at::ScalarType> half;
  for (const IValue& value : stack) {
    if (value.isTensor() && at::isReducedFloatingType(value.toTensor().scalar_type())) {
      half = value.toTensor().scalar_type();
    }
  }
  if (!half || !kProducts.count(name)) return op.callBoxed(stack);
  for (IValue& value : stack) {
    if (value.isTensor() && value.toTensor().defined()) value = value.toTensor().to(at::kDouble);
  }
  op.callBoxed(stack);
  for (IValue& value : stack) value = value.toTensor().to(*half);
}

// One call on its way through the layer.
class Call {
 public:
  Call(const OperatorHandle& op, std::vector<IValue> arguments)
      : op_(op), schema_(op.schema()), name_(full_name(op.operator_name())), in_(std::move(arguments)) {}

  void run(Stack* stack) {
    static const Rule no_rule;
    const auto found = rules.find(name_);
    const Rule& rule = found == rules.end() ? no_rule : found->second;
    void* stream = current_stream();
    const Mode mode = emulator::mode_of(stream);
    check_arguments(name_, rule, in_, mode);
    const char* how = is_view()                ? "viewed "
                      : mode == Mode::kCapture ? "captured "
                      : mode == Mode::kUpdate  ? "updated "
                                               : "eager ";
    emulator::count_request(how + name_);
    find_packed();
    if (rule.waits_for_device) wait_for_stream(name_, mode);
    recorded_ = !rule.waits_for_device && emulator::defers(stream);
    for (const IValue& value : in_) arguments_.push_back(to_host(value, pairs_, host_view));
    Stack results = recorded_ ? shapes() : execute();
    for (size_t i = 0; i < results.size(); ++i) stack->push_back(to_device(results[i], i));
    if (recorded_) submit(stream);
  }

 private:
  // Whether the result is an argument seen in another shape, for which a device has nothing to do.
  bool is_view() const {
    if (schema_.returns().empty()) return false;
    const auto* alias = schema_.returns()[0].alias_info();
    return alias && !alias->isWrite();
  }

  // Matrices in FRACTAL_NZ are read when the call runs; nothing else may be done with them.
  void find_packed() {
    for (size_t i = 0; i < in_.size(); ++i) {
      for_each_tensor(in_[i], [&](const Tensor& tensor) {
        if (!tensor.defined() || !is_packed(tensor)) return;
        check_packed_argument(name_, i, in_);
        packed_.emplace_back(i, PackedMatrix(name_, tensor));
      });
    }
  }

  // Run on the device's memory, now.
  Stack execute() {
    find_empty_results();
    Stack stack(arguments_.begin(), arguments_.end());
    for (const auto& [position, matrix] : packed_) stack[position] = matrix.read();
    call_on_host(op_, name_, stack);
    for (size_t position : empty_results_) {
      const Tensor host = arguments_[position].toTensor();
      Tensor device = in_[position].toTensor();
      device.resize_(host.sizes());
      host_view(device).copy_(host);
    }
    return stack;
  }

  // Run on stand-ins to learn what the results look like.
  Stack shapes() {
    std::vector<IValue> values;
    for (const IValue& value : in_) values.push_back(to_host(value, stand_ins_, stand_in));
    find_empty_results();
    for (size_t position : empty_results_) values[position] = at::empty({0}, arguments_[position].toTensor().options());
    Stack stack(values.begin(), values.end());
    ++shape_passes;
    try {
      op_.callBoxed(stack);
    } catch (...) {
      --shape_passes;
      throw;
    }
    --shape_passes;
    for (size_t position : empty_results_) {
      Tensor device = in_[position].toTensor();
      device.resize_(values[position].toTensor().sizes());
      arguments_[position] = host_view(device);
    }
    return stack;
  }

  // out= tensors without elements are sized by the operator.
  void find_empty_results() {
    for (size_t i = 0; i < in_.size(); ++i) {
      if (!schema_.arguments()[i].is_out() || !in_[i].isTensor()) continue;
      const Tensor tensor = in_[i].toTensor();
      if (!on_device(tensor) || tensor.numel() != 0) continue;
      arguments_[i] = at::empty({0}, at::TensorOptions().dtype(tensor.dtype()));
      empty_results_.push_back(i);
    }
  }

  IValue to_device(const IValue& value, size_t index) {
    if (value.isTensor()) return to_device(value.toTensor(), index);
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorList()) list.push_back(to_device(tensor, index));
      return list;
    }
    return value;
  }

  Tensor to_device(const Tensor& result, size_t index) {
    if (!result.defined() || result.is_meta()) return written(Tensor(), result);  // made for another device on purpose
    if (schema_.returns().size() == 1 && empty_results_.size() == 1) {
      return written(Tensor(), in_[empty_results_[0]].toTensor());
    }
    const auto* alias = index < schema_.returns().size() ? schema_.returns()[index].alias_info() : nullptr;
    if (alias && alias->isWrite()) {
      for (size_t i = 0; i < in_.size(); ++i) {
        const auto* info = schema_.arguments()[i].alias_info();
        if (info && info->isWrite() && info->beforeSets() == alias->beforeSets() && in_[i].isTensor()) {
          return written(Tensor(), in_[i].toTensor());
        }
      }
    }
    const void* memory = result.storage().data();
    for (const Pair& pair : recorded_ ? stand_ins_ : pairs_) {
      if (!memory || !pair.host.numel() || memory != pair.host.storage().data()) continue;
      if (result.sizes() == pair.device.sizes() && result.strides() == pair.device.strides() &&
          result.storage_offset() == 0) {
        return written(Tensor(), pair.device);
      }
      return written(Tensor(), view_like(result, pair.device));
    }
    const c10::Device device(c10::DeviceType::PrivateUse1, c10_npu::getCurrentNPUStream().device_index());
    const auto options = result.options().device(device).pinned_memory(false);
    Tensor fresh = at::empty_strided(result.sizes(), result.strides(), options);
    if (!recorded_ && fresh.numel()) host_view(fresh).copy_(result);
    return written(host_view(fresh), fresh);
  }

  // A view of the device's memory with the geometry and the dtype of a result that shares the host's.
  static Tensor view_like(const Tensor& result, const Tensor& device) {
    if (result.dtype() == device.dtype()) {
      const auto offset = device.storage_offset() + result.storage_offset();
      return device.as_strided(result.sizes(), result.strides(), offset);
    }
    const auto bytes = device.storage_offset() * static_cast<int64_t>(device.itemsize());
    const auto offset = bytes / static_cast<int64_t>(result.itemsize()) + result.storage_offset();
    Tensor view = at::empty({0}, device.options().dtype(result.dtype()));
    return view.set_(device.storage(), offset, result.sizes(), result.strides());
  }

  // Remember where a result's value must go when the recorded call runs; undefined = it is written in place.
  Tensor written(const Tensor& host, const Tensor& device) {
    targets_.push_back(host);
    return device;
  }

  void submit(void* stream) {
    auto run = [op = op_, name = name_, arguments = arguments_, targets = targets_, packed = packed_] {
      c10::InferenceMode inference(true);
      Stack stack(arguments.begin(), arguments.end());
      for (const auto& [position, matrix] : packed) stack[position] = matrix.read();
      try {
        call_on_host(op, name, stack);
        size_t position = 0;
        for (const IValue& value : stack) {
          for_each_tensor(value, [&](const Tensor& tensor) {
            if (position < targets.size() && targets[position].defined() && targets[position].numel()) {
              targets[position].copy_(tensor);
            }
            ++position;
          });
        }
      } catch (const std::exception& error) {
        emulator::report("recorded " + name + " failed: " + error.what());
        std::abort();  // a device cannot throw either: there, the stream is dead
      }
    };
    TORCH_CHECK(emulator::submit(stream, name_, run) == 0, "[ascend emulator] ", name_, " could not be queued");
  }

  const OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const std::string name_;
  const std::vector<IValue> in_;
  std::vector<IValue> arguments_;  // the same on the host
  std::vector<Pair> pairs_, stand_ins_;
  std::vector<size_t> empty_results_;
  std::vector<std::pair<size_t, PackedMatrix>> packed_;
  std::vector<Tensor> targets_;
  bool recorded_ = false;
};

void any_operator(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  std::vector<IValue> arguments(stack->end() - count, stack->end());
  torch::jit::drop(*stack, count);
  Call(op, std::move(arguments)).run(stack);
}

void without_kernel(const OperatorHandle& op, c10::DispatchKeySet, Stack*) {
  TORCH_CHECK(false, "[ascend emulator] ", full_name(op.operator_name()),
              " has no kernel for this device; torch_npu would copy its arguments to the host and compute there");
}

// Copies between host and device wait for the stream unless the host side is pinned and the caller does not block.
Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  void* stream = current_stream();
  const Mode mode = emulator::mode_of(stream);
  const bool to_host = !on_device(self), from_host = !on_device(source);
  const char* name = to_host ? "copy device to host" : from_host ? "copy host to device" : "copy on device";
  emulator::count_request((mode == Mode::kCapture ? "captured " : "eager ") + std::string(name));
  bool waits = false;
  if (to_host || from_host) {
    const Tensor& host = to_host ? self : source;
    waits = !non_blocking || !host.is_pinned();
    emulator::count_request(to_host ? "copies_device_to_host" : "copies_host_to_device");
    if (waits) wait_for_stream(std::string(name) + (host.is_pinned() ? "" : " (pageable memory)"), mode);
  }
  TORCH_CHECK(!is_packed(self) && (to_host || !is_packed(source)), "[ascend emulator] ", name,
              ": a tensor in FRACTAL_NZ can only be copied to the host; npu_format_cast it to ND first");
  const Tensor target = to_host ? self : host_view(self);
  const Tensor value = from_host ? source : is_packed(source) ? PackedMatrix(name, source).read() : host_view(source);
  if (waits || !emulator::defers(stream)) {
    target.copy_(value);
  } else {
    auto run = [target, value] {
      c10::InferenceMode inference(true);
      target.copy_(value);
    };
    TORCH_CHECK(emulator::submit(stream, name, run) == 0, "[ascend emulator] ", name, " could not be queued");
  }
  return self;
}

at::Scalar read_scalar(const Tensor& self) {
  wait_for_stream("aten::_local_scalar_dense", emulator::mode_of(current_stream()));
  emulator::count_request("eager aten::_local_scalar_dense");
  TORCH_CHECK(!is_packed(self), "[ascend emulator] aten::_local_scalar_dense of a tensor in FRACTAL_NZ");
  return host_view(self).item();
}

Tensor to_copy(const Tensor& self, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
               std::optional<at::Device> device, std::optional<bool> pin_memory, bool non_blocking,
               std::optional<at::MemoryFormat> format) {
  return at::native::_to_copy(self, dtype, layout, device, pin_memory, non_blocking, format);
}

// Fresh memory is poisoned also when the allocator hands a used block out again, and at every replay of a graph in
// which it was allocated: whoever reads before writing sees NaN or -1.
void poison(const Tensor& t) {
  const size_t bytes = t.storage().nbytes();
  if (bytes == 0) return;
  void* memory = const_cast<void*>(t.storage().data());
  TORCH_CHECK(emulator::submit(current_stream(), "poison", [=] { std::memset(memory, 0xFF, bytes); }) == 0);
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
             std::optional<at::Device> device, std::optional<bool> pin_memory, std::optional<at::MemoryFormat>) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("npu::empty_with_format", "");
  Stack stack{size, dtype, layout, device, pin_memory, kPlainFormat};
  while (stack.size() < op.schema().arguments().size()) {
    stack.push_back(*op.schema().arguments()[stack.size()].default_value());
  }
  op.callBoxed(stack);
  Tensor result = stack[0].toTensor();
  poison(result);
  return result;
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout> layout, std::optional<at::Device> device,
                     std::optional<bool> pin_memory) {
  int64_t last = 0;
  for (size_t i = 0; i < size.size(); ++i) last = size[i] == 0 || last < 0 ? -1 : last + (size[i] - 1) * stride[i];
  Tensor result = empty({last + 1}, dtype, layout, device, pin_memory, std::nullopt);
  result.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return result;
}

// Kernels of torch_npu that stay: they handle geometry and memory, not values.
const std::set<std::string> kKept = {
    "aten::scaled_dot_product_attention", "aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::view.dtype",
    "aten::resize_", "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset", "aten::set_", "aten::set_.source_Tensor", "aten::alias",
    "aten::detach", "aten::record_stream", "aten::is_pinned", "aten::_pin_memory", "aten::is_set_to", "aten::unfold",
    "aten::_has_compatible_shallow_copy_type", "npu::get_npu_format", "npu::copy_memory_",
    "npu::get_storage_size", "npu::unsafe_empty_with_format", "npu::empty_with_format", "npu::empty_with_swapped_memory", "npu::npu_prefetch",
    // and these have a kernel of their own here
    "aten::copy_", "aten::_local_scalar_dense", "aten::_to_copy", "aten::empty.memory_format", "aten::empty_strided",
    "npu::npu_format_cast"};

bool is_composite(const OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
}

bool computes_on_host(const OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) || is_composite(op);
}

void without_reference(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const bool has_one_by_now = computes_on_host(op);
  TORCH_CHECK(has_one_by_now, "[ascend emulator] ", full_name(op.operator_name()),
              " has no reference kernel in the emulator");
  any_operator(op, keys, stack);
}

torch::Library& library(const std::string& space) {
  static std::map<std::string, std::unique_ptr<torch::Library>> libraries;
  auto& entry = libraries[space];
  if (!entry) {
    constexpr auto key = c10::DispatchKey::PrivateUse1;
    entry = std::make_unique<torch::Library>(torch::Library::IMPL, space, key, __FILE__, __LINE__);
  }
  return *entry;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Put the layer over all device kernels that exist by now; returns how many. Call again when a library adds operators.
EXPORT long ascend_emulator_install() {
  static std::set<std::string> done;
  if (done.empty()) {
    library("aten").impl("copy_", torch::dispatch(c10::DispatchKey::PrivateUse1, TORCH_FN(copy)));
    library("aten").impl("_local_scalar_dense", torch::dispatch(c10::DispatchKey::PrivateUse1, TORCH_FN(read_scalar)));
    library("aten").impl("_to_copy", torch::dispatch(c10::DispatchKey::PrivateUse1, TORCH_FN(to_copy)));
    library("aten").impl("empty.memory_format", torch::dispatch(c10::DispatchKey::PrivateUse1, TORCH_FN(empty)));
    library("aten").impl("empty_strided", torch::dispatch(c10::DispatchKey::PrivateUse1, TORCH_FN(empty_strided)));
    library("npu").impl("npu_format_cast", torch::dispatch(c10::DispatchKey::PrivateUse1, TORCH_FN(format_cast)));
  }
  long replaced = 0;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const std::string full = full_name(name), space = full.substr(0, full.find("::"));
    const bool own = space == "ascend_emulator";  // stand-ins for kernels that are no operators
    if (!own && space != "aten" && space != "npu" && space != "atb" && space != "_C_ascend") continue;
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (!op || !op->hasSchema() || kKept.count(full)) continue;
    const std::string local = full.substr(space.size() + 2);
    const bool has_kernel = op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1);
    // Without a device kernel, a composite operator falls apart into others; one that only the host computes is refused.
    const bool host_only = op->hasKernelForDispatchKey(c10::DispatchKey::CPU) && !is_composite(*op);
    if (!has_kernel && !own && (space != "aten" || !host_only)) continue;
    if (!done.insert(full).second) continue;
    auto function = !has_kernel && !own     ? torch::CppFunction::makeFromBoxedFunction<&without_kernel>()
                    : computes_on_host(*op) ? torch::CppFunction::makeFromBoxedFunction<&any_operator>()
                                            : torch::CppFunction::makeFromBoxedFunction<&without_reference>();
    library(space).impl(local.c_str(), std::move(function));
    ++replaced;
  }
  return replaced;
}

EXPORT void ascend_emulator_add_rule(const char* name, int flags, uint64_t dtypes, uint64_t ai_core,
                                     const char* reason) {
  rules[name] = Rule{(flags & 1) != 0, (flags & 2) != 0, dtypes, ai_core, reason};
}

// Whether a reference kernel is being run for its result shapes alone; it must not judge contents then.
EXPORT int ascend_emulator_shape_pass() { return shape_passes; }

// What the operator layer knows of arguments: how device tensors are seen from the host, and what rules forbid.
#pragma once
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>

#include "emulator.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"

namespace {

using at::Tensor;
using c10::IValue;
using c10::OperatorHandle;
using emulator::Mode;
using torch::jit::Stack;

struct Rule {
  bool waits_for_device = false;  // the result's value or shape must reach the host
  bool never_captured = false;
  uint64_t dtypes = 0;   // bit per at::ScalarType allowed in device arguments, 0 = the default set
  uint64_t ai_core = 0;  // bit per at::ScalarType that runs on the AI Core, 0 = all
  std::string reason;
};

std::map<std::string, Rule> rules;
thread_local int shape_passes = 0;  // > 0 while an operator runs on stand-ins for its shapes alone

constexpr uint64_t bit(at::ScalarType type) { return uint64_t{1} << static_cast<int>(type); }
const uint64_t kDefaultDtypes = ~bit(at::kDouble);

void* current_stream() { return c10_npu::getCurrentNPUStream().stream(false); }
bool on_device(const Tensor& t) { return t.defined() && t.device().type() == c10::DeviceType::PrivateUse1; }

std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

Tensor host_view(const Tensor& t) {
  const auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), options);
  return at::from_blob(const_cast<void*>(t.const_data_ptr()), t.sizes(), t.strides(), options);
}

// Zeros that take no memory until they are written: caches of gigabytes are arguments, too.
Tensor large_stand_in(const Tensor& t, size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(memory != MAP_FAILED, "[ascend emulator] no address space for ", bytes, " bytes");
  const auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  return at::from_blob(memory, t.sizes(), t.strides(), [bytes](void* m) { munmap(m, bytes); }, options);
}

// A tensor of the same geometry whose contents are valid as an index and, unless it is large, a probability or divisor.
Tensor stand_in(const Tensor& t) {
  const auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  const size_t bytes = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize());
  if (bytes > (size_t{1} << 20)) return large_stand_in(t, bytes);
  Tensor copy = at::empty_strided(t.sizes(), t.strides(), options);
  return at::isFloatingType(t.scalar_type()) ? copy.fill_(1) : copy.zero_();
}

at::Generator host_generator(const at::Generator& generator) {
  static std::mutex mutex;
  static std::map<void*, at::Generator> known;
  std::lock_guard<std::mutex> lock(mutex);
  auto* key = static_cast<void*>(generator.unsafeGetGeneratorImpl());
  auto found = known.find(key);
  if (found == known.end()) {
    found = known.emplace(key, at::detail::createCPUGenerator(generator.current_seed())).first;
  }
  return found->second;
}

struct Pair {
  Tensor device, host;
};

// Replace device tensors, the device and its generators in a value by their counterparts on the host.
IValue to_host(const IValue& value, std::vector<Pair>& pairs, Tensor (*view)(const Tensor&)) {
  if (value.isTensor()) {
    const Tensor tensor = value.toTensor();
    if (!on_device(tensor)) return value;
    pairs.push_back({tensor, view(tensor)});
    return pairs.back().host;
  }
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorList()) list.push_back(to_host(tensor, pairs, view).toTensor());
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) {
      list.push_back(tensor ? std::optional<Tensor>(to_host(*tensor, pairs, view).toTensor()) : std::nullopt);
    }
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == c10::DeviceType::PrivateUse1) return c10::Device(at::kCPU);
  if (value.isGenerator() && value.toGenerator().defined() &&
      value.toGenerator().device().type() == c10::DeviceType::PrivateUse1) {
    return host_generator(value.toGenerator());
  }
  return value;
}

void for_each_tensor(const IValue& value, const std::function<void(const Tensor&)>& visit) {
  if (value.isTensor()) visit(value.toTensor());
  if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorList()) visit(tensor);
  }
  if (value.isOptionalTensorList()) {
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) {
      if (tensor) visit(*tensor);
    }
  }
}

// Wait for the current stream, as a kernel does that hands a value to the host.
void wait_for_stream(const std::string& name, Mode mode) {
  TORCH_CHECK(mode != Mode::kCapture, "[ascend emulator] ", name,
              " makes the host wait for the device while the stream is capturing (on a device: error 107027/107030)");
  const int error = emulator::synchronize(current_stream(), name.c_str());
  TORCH_CHECK(error == 0, "[ascend emulator] ", name, ": the stream failed with ", error);
}

void check_arguments(const std::string& name, const Rule& rule, const std::vector<IValue>& arguments, Mode mode) {
  TORCH_CHECK(!(rule.never_captured && mode == Mode::kCapture), "[ascend emulator] ", name,
              " cannot be captured: ", rule.reason);
  const uint64_t allowed = rule.dtypes ? rule.dtypes : kDefaultDtypes;
  const bool is_aten = name.rfind("aten::", 0) == 0;
  for (const IValue& argument : arguments) {
    for_each_tensor(argument, [&](const Tensor& tensor) {
      if (!tensor.defined()) return;
      if (on_device(tensor)) {
        TORCH_CHECK(allowed & bit(tensor.scalar_type()), "[ascend emulator] ", name, " does not take ",
                    tensor.scalar_type(), " on this device", rule.reason.empty() ? "" : ": ", rule.reason);
        if (rule.ai_core && !(rule.ai_core & bit(tensor.scalar_type()))) emulator::count("ai_cpu " + name);
      } else {
        TORCH_CHECK(!is_aten || tensor.dim() == 0, "[ascend emulator] ", name, " got a host tensor of shape ",
                    tensor.sizes(), " beside device tensors");
      }
    });
  }
  if (mode == Mode::kCapture && (name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put", 0) == 0)) {
    for (const IValue& argument : arguments) {
      if (!argument.isOptionalTensorList()) continue;
      for_each_tensor(argument, [&](const Tensor& tensor) {
        TORCH_CHECK(!tensor.defined() || (tensor.scalar_type() != at::kBool && tensor.scalar_type() != at::kByte),
                    "[ascend emulator] ", name,
                    ": a boolean mask as an index has a result of unknown size and cannot be captured");
      });
    }
  }
}

}  // namespace

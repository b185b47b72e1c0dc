// Matrices in the device's own layout FRACTAL_NZ: tiles of 16 rows by 32 bytes, one column of tiles after the other,
// the last ones filled up with zeros. The storage's description says which layout its bytes are in, as torch_npu keeps it.
//
// What may be done with such a tensor is what the documentation of aclnnNpuFormatCast, aclnnMatmulWeightNz and
// aclnnAddmmWeightNz allows: be the right operand of a product of half-precision matrices, whole or transposed.
#pragma once
#include "arguments.h"
#include "torch_npu/csrc/core/NPUStorageImpl.h"

namespace {

constexpr int64_t kPlainFormat = ACL_FORMAT_ND, kPackedFormat = ACL_FORMAT_FRACTAL_NZ;
constexpr int64_t kTileRows = 16, kTileBytes = 32;

const torch_npu::NPUStorageDesc& layout_of(const Tensor& t) {
  return static_cast<torch_npu::NPUStorageImpl*>(t.storage().unsafeGetStorageImpl())->npu_desc_;
}

bool is_packed(const Tensor& t) {
  return on_device(t) && t.has_storage() && layout_of(t).npu_format_ == kPackedFormat;
}

// A whole packed matrix by its address, so that a recorded task can read it when it runs.
struct PackedMatrix {
  void* memory;
  int64_t rows, columns;  // of the matrix that was packed
  at::ScalarType type;
  bool transposed;  // seen through a transposing view

  PackedMatrix(const std::string& user, const Tensor& t) {
    const auto& sizes = layout_of(t).base_sizes_;
    TORCH_CHECK(sizes.size() == 2, "[ascend emulator] ", user, ": only matrices are emulated in FRACTAL_NZ");
    const bool straight = t.dim() == 2 && t.sizes() == at::IntArrayRef(sizes) && t.is_contiguous();
    transposed = !straight && t.dim() == 2 && t.t().sizes() == at::IntArrayRef(sizes) && t.t().is_contiguous();
    TORCH_CHECK((straight || transposed) && t.storage_offset() == 0, "[ascend emulator] ", user,
                " got a part or another shape of a tensor in FRACTAL_NZ; after npu_format_cast it can only be used "
                "whole, as it is or transposed");
    memory = const_cast<void*>(t.storage().data());
    rows = sizes[0], columns = sizes[1], type = t.scalar_type();
  }

  int64_t tile_columns() const { return kTileBytes / static_cast<int64_t>(c10::elementSize(type)); }
  int64_t tiles_down() const { return (rows + kTileRows - 1) / kTileRows; }
  int64_t tiles_across() const { return (columns + tile_columns() - 1) / tile_columns(); }
  Tensor tiles() const {
    return at::from_blob(memory, {tiles_across(), tiles_down(), kTileRows, tile_columns()}, at::TensorOptions(type));
  }

  Tensor read() const {
    const Tensor padded = tiles().permute({1, 2, 0, 3}).reshape({tiles_down() * kTileRows, -1});
    const Tensor plain = padded.slice(0, 0, rows).slice(1, 0, columns).contiguous();
    return transposed ? plain.t() : plain;
  }

  void write(const Tensor& plain) const {
    const auto options = at::TensorOptions(type);
    const Tensor padded = at::zeros({tiles_down() * kTileRows, tiles_across() * tile_columns()}, options);
    padded.slice(0, 0, rows).slice(1, 0, columns).copy_(plain);
    tiles().copy_(padded.view({tiles_down(), kTileRows, tiles_across(), tile_columns()}).permute({2, 0, 1, 3}));
  }
};

// The operators that take a packed matrix, and as which argument.
const std::map<std::string, size_t> kPackedArgument = {
    {"aten::mm", 1}, {"aten::mm.out", 1}, {"aten::matmul", 1}, {"aten::matmul.out", 1}, {"aten::addmm", 2},
    {"aten::addmm.out", 2},
};

void check_packed_argument(const std::string& name, size_t position, const std::vector<IValue>& arguments) {
  const auto found = kPackedArgument.find(name);
  TORCH_CHECK(found != kPackedArgument.end() && found->second == position, "[ascend emulator] ", name,
              " got a tensor in FRACTAL_NZ as argument ", position,
              "; after npu_format_cast only a matrix product may read it, as its right operand");
  const Tensor left = arguments[position - 1].toTensor(), right = arguments[position].toTensor();
  const auto type = right.scalar_type();
  TORCH_CHECK((type == at::kHalf || type == at::kBFloat16) && left.scalar_type() == type, "[ascend emulator] ", name,
              " of ", left.scalar_type(), " and ", type, " in FRACTAL_NZ: float16 or bfloat16 only, both the same");
  TORCH_CHECK(left.dim() == 2, "[ascend emulator] ", name, " takes a left operand of 2 dimensions beside a matrix in "
              "FRACTAL_NZ, got ", left.dim());
  TORCH_CHECK(right.size(0) != 1 && right.size(1) != 1, "[ascend emulator] ", name,
              ": no FRACTAL_NZ matrix with a side of 1 (", right.sizes(), ")");
}

// A tensor that really has the layout, or plain where the process forbids such layouts; torch_npu itself decides.
Tensor empty_in_layout(const Tensor& like, int64_t format) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("npu::unsafe_empty_with_format", "");
  Stack stack{like.sizes(), like.scalar_type(), at::kStrided, like.device(), false, format, false};
  op.callBoxed(stack);
  return stack[0].toTensor();
}

Tensor format_cast(const Tensor& self, int64_t format, std::optional<int64_t> customize_dtype,
                   std::optional<int64_t> input_dtype) {
  static const std::string name = "npu::npu_format_cast";
  static const std::set<at::ScalarType> kTypes = {at::kChar, at::kByte, at::kHalf, at::kBFloat16,
                                                  at::kFloat, at::kInt};
  void* stream = current_stream();
  emulator::count((emulator::mode_of(stream) == Mode::kCapture ? "captured " : "eager ") + name);
  TORCH_CHECK(!customize_dtype && !input_dtype && (format == kPlainFormat || format == kPackedFormat),
              "[ascend emulator] ", name, ": only casts between ND (2) and FRACTAL_NZ (29) are emulated, got ", format);
  if (layout_of(self).npu_format_ == format) return self;
  TORCH_CHECK(kTypes.count(self.scalar_type()), "[ascend emulator] ", name, " does not take ", self.scalar_type());
  TORCH_CHECK(self.dim() >= 2 && self.dim() <= 6 && self.numel() > 0, "[ascend emulator] ", name,
              " takes tensors of 2 to 6 dimensions that are not empty, got ", self.sizes());
  TORCH_CHECK(self.is_contiguous(), "[ascend emulator] ", name, " takes contiguous tensors only");
  Tensor result = empty_in_layout(self, format);
  std::function<void()> run;
  if (is_packed(self)) {
    run = [from = PackedMatrix(name, self), to = host_view(result)] { to.copy_(from.read()); };
  } else if (is_packed(result)) {
    run = [from = host_view(self), to = PackedMatrix(name, result)] { to.write(from); };
  } else {  // such layouts are forbidden: "tensor will be created with base format"
    run = [from = host_view(self), to = host_view(result)] { to.copy_(from); };
  }
  auto task = [run] {
    c10::InferenceMode inference(true);
    run();
  };
  TORCH_CHECK(emulator::submit(stream, name, task) == 0, "[ascend emulator] ", name, " could not be queued");
  return result;
}

}  // namespace

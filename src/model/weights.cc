// SPDX-License-Identifier: MIT
#include "model/weights.h"

#include <ggml-alloc.h>
#include <ggml-cpu.h>

#include <algorithm>
#include <cstring>

#include "model/ggml_runtime.h"

namespace fathom {
namespace {

ggml_context_ptr MakeContext(std::size_t n_tensors) {
  ggml_init_params params{};
  params.mem_size = (n_tensors + 1) * ggml_tensor_overhead();
  params.no_alloc = true;
  ggml_context_ptr context(ggml_init(params));
  if (!context) throw Error(ErrorCode::kNoMemory, "not enough memory for the tensor table");
  return context;
}

// Whether the CPU can multiply by and look rows up in this type.
bool IsUsableType(ggml_type type) {
  const ggml_type_traits_cpu* cpu = ggml_get_type_traits_cpu(type);
  const bool has_rows = type == GGML_TYPE_F32 || ggml_get_type_traits(type)->to_float != nullptr;
  return cpu != nullptr && cpu->vec_dot != nullptr && has_rows;
}

// ggml's buffer types with faster layouts for this CPU; may be empty.
std::vector<ggml_backend_buffer_type_t> ExtraBufferTypes(ggml_backend_dev_t device) {
  std::vector<ggml_backend_buffer_type_t> types;
  ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(device);
  const auto get = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
      ggml_backend_reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts"));
  if (get == nullptr) return types;
  for (ggml_backend_buffer_type_t* type = get(device); type != nullptr && *type != nullptr;
       ++type) {
    types.push_back(*type);
  }
  return types;
}

// Whether a product with this weight would run from a buffer of this type.
bool Supports(ggml_backend_dev_t device, ggml_backend_buffer_t empty, const ggml_tensor* weight) {
  const ggml_context_ptr context = MakeContext(3);
  ggml_tensor* copy = ggml_dup_tensor(context.get(), weight);
  copy->buffer = empty;
  ggml_tensor* rows = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, weight->ne[0], 512);
  return ggml_backend_dev_supports_op(device, ggml_mul_mat(context.get(), copy, rows));
}

// Where a set points to its matrices.
std::vector<ggml_tensor**> MatrixSlots(WeightSet& set) {
  std::vector<ggml_tensor**> slots = {&set.output};
  for (LayerWeights& w : set.layers) {
    slots.insert(slots.end(), {&w.attn_q, &w.attn_k, &w.attn_v, &w.attn_output, &w.ffn_gate,
                               &w.ffn_up, &w.ffn_down});
  }
  return slots;
}

}  // namespace

Weights::Weights(const GgufFile& file, const HParams& hparams) : file_(file) {
  context_ = MakeContext(file.tensors().size());
  // ggml's interface has no const; nothing writes to weights, and the pages are read-only.
  const std::span<const std::byte> bytes = file.mapping().bytes();
  file_buffer_.reset(
      ggml_backend_cpu_buffer_from_ptr(const_cast<std::byte*>(bytes.data()), bytes.size()));
  if (!file_buffer_) throw file.MakeError(ErrorCode::kInternal, "ggml refused the mapped file");
  ggml_backend_buffer_set_usage(file_buffer_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);

  const GgufTensor* embedding = file.FindTensor("token_embd.weight");
  token_embd_ = Matrix("token_embd.weight", hparams.n_embd, embedding ? embedding->shape[1] : 1);
  output_norm_ = Vector("output_norm.weight", hparams.n_embd);
  tied_output_ = file.FindTensor("output.weight") == nullptr;
  mapped_.output = tied_output_ ? token_embd_ : Matrix("output.weight", hparams.n_embd, n_vocab());
  if (hparams.architecture == Architecture::kQwen2) {
    output_bias_ = OptionalVector("output.bias", n_vocab());
  }
  if (hparams.architecture == Architecture::kLlama) {
    rope_freqs_ = OptionalVector("rope_freqs.weight", hparams.rope.n_dims / 2);
    if (rope_freqs_ != nullptr && hparams.rope.n_dims != hparams.heads.head_dim) {
      throw file.MakeError(ErrorCode::kUnsupported,
                           "tensor 'rope_freqs.weight' together with rope.dimension_count " +
                               std::to_string(hparams.rope.n_dims) + " below head_dim " +
                               std::to_string(hparams.heads.head_dim));
    }
  }
  for (std::int32_t layer = 0; layer < hparams.n_layers; ++layer) BindLayer(hparams, layer);
  packed_ = mapped_;
  for (ggml_tensor** slot : PlanRepack().slots) {
    repack_bytes_ += static_cast<std::int64_t>(ggml_nbytes(*slot));
  }
  for (const GgufTensor& tensor : file.tensors()) {
    if (used_.count(tensor.name) != 0) continue;
    throw file.MakeError(ErrorCode::kUnsupported, "tensor " + Quoted(tensor.name) +
                                                      " is not part of the " +
                                                      hparams.architecture_name +
                                                      " graph of this version and would be "
                                                      "ignored; convert the model without it");
  }
}

void Weights::BindLayer(const HParams& hparams, std::int32_t layer) {
  const std::string p = "blk." + std::to_string(layer) + ".";
  const std::int64_t n_embd = hparams.n_embd;
  const std::int64_t n_ff = hparams.n_ff;
  const std::int64_t q_size = hparams.q_size();
  const std::int64_t kv_size = hparams.kv_size();
  LayerWeights w;
  w.attn_norm = Vector(p + "attn_norm.weight", n_embd);
  w.attn_q = Matrix(p + "attn_q.weight", n_embd, q_size);
  w.attn_k = Matrix(p + "attn_k.weight", n_embd, kv_size);
  w.attn_v = Matrix(p + "attn_v.weight", n_embd, kv_size);
  w.attn_output = Matrix(p + "attn_output.weight", q_size, n_embd);
  w.attn_q_bias = OptionalVector(p + "attn_q.bias", q_size);
  w.attn_k_bias = OptionalVector(p + "attn_k.bias", kv_size);
  w.attn_v_bias = OptionalVector(p + "attn_v.bias", kv_size);
  if (hparams.architecture == Architecture::kQwen3) {
    w.attn_q_norm = Vector(p + "attn_q_norm.weight", hparams.heads.head_dim);
    w.attn_k_norm = Vector(p + "attn_k_norm.weight", hparams.heads.head_dim);
  }
  w.ffn_norm = Vector(p + "ffn_norm.weight", n_embd);
  w.ffn_gate = Matrix(p + "ffn_gate.weight", n_embd, n_ff);
  w.ffn_up = Matrix(p + "ffn_up.weight", n_embd, n_ff);
  w.ffn_down = Matrix(p + "ffn_down.weight", n_ff, n_embd);
  if (hparams.architecture == Architecture::kLlama) {
    w.attn_output_bias = OptionalVector(p + "attn_output.bias", n_embd);
    w.ffn_gate_bias = OptionalVector(p + "ffn_gate.bias", n_ff);
    w.ffn_up_bias = OptionalVector(p + "ffn_up.bias", n_ff);
    w.ffn_down_bias = OptionalVector(p + "ffn_down.bias", n_embd);
  }
  mapped_.layers.push_back(w);
}

ggml_tensor* Weights::Matrix(const std::string& name, std::int64_t in, std::int64_t out) {
  const GgufTensor* tensor = file_.FindTensor(name);
  if (tensor == nullptr) {
    throw file_.MakeError(ErrorCode::kCorrupt,
                          "tensor " + Quoted(name) + " is missing; convert the model again");
  }
  if (!IsUsableType(tensor->type)) {
    throw file_.MakeError(ErrorCode::kUnsupported,
                          "tensor " + Quoted(name) + " has type " + ggml_type_name(tensor->type) +
                              ", which the CPU kernels cannot multiply; quantize to another type");
  }
  return Bind(*tensor, {in, out});
}

ggml_tensor* Weights::Vector(const std::string& name, std::int64_t size) {
  ggml_tensor* vector = OptionalVector(name, size);
  if (vector == nullptr) {
    throw file_.MakeError(ErrorCode::kCorrupt,
                          "tensor " + Quoted(name) + " is missing; convert the model again");
  }
  return vector;
}

ggml_tensor* Weights::OptionalVector(const std::string& name, std::int64_t size) {
  const GgufTensor* tensor = file_.FindTensor(name);
  if (tensor == nullptr) return nullptr;
  if (tensor->type != GGML_TYPE_F32) {
    throw file_.MakeError(ErrorCode::kUnsupported,
                          "tensor " + Quoted(name) + " has type " + ggml_type_name(tensor->type) +
                              ", norms, biases and factors must be f32; convert the model again");
  }
  return Bind(*tensor, {size});
}

ggml_tensor* Weights::Bind(const GgufTensor& tensor, std::initializer_list<std::int64_t> shape) {
  std::array<std::int64_t, GGML_MAX_DIMS> expected{1, 1, 1, 1};
  std::copy(shape.begin(), shape.end(), expected.begin());
  if (tensor.shape != expected) {
    throw file_.MakeError(ErrorCode::kCorrupt,
                          "tensor " + Quoted(tensor.name) + " has shape " +
                              ShapeText(tensor.shape) + ", the metadata asks for " +
                              ShapeText(expected) + "; convert the model again");
  }
  ggml_tensor* bound =
      ggml_new_tensor(context_.get(), tensor.type, static_cast<int>(shape.size()), expected.data());
  ggml_set_name(bound, tensor.name.c_str());
  if (ggml_backend_tensor_alloc(file_buffer_.get(), bound, const_cast<std::byte*>(tensor.data)) !=
      GGML_STATUS_SUCCESS) {
    throw file_.MakeError(ErrorCode::kInternal, "ggml refused tensor " + Quoted(tensor.name));
  }
  used_.insert(tensor.name);
  return bound;
}

Weights::RepackPlan Weights::PlanRepack() {
  ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  if (device == nullptr) return {};
  for (ggml_backend_buffer_type_t type : ExtraBufferTypes(device)) {
    const ggml_backend_buffer_ptr empty(ggml_backend_buft_alloc_buffer(type, 0));
    RepackPlan plan{type, {}};
    for (ggml_tensor** slot : MatrixSlots(packed_)) {
      if (Supports(device, empty.get(), *slot)) plan.slots.push_back(slot);
    }
    // The first type that takes anything, as libllama orders them.
    if (!plan.slots.empty()) return plan;
  }
  return {};
}

void Weights::Repack() {
  const RepackPlan plan = PlanRepack();
  if (plan.slots.empty()) return;
  repack_context_ = MakeContext(plan.slots.size());
  std::vector<ggml_tensor*> copies;
  for (ggml_tensor** slot : plan.slots) {
    copies.push_back(ggml_dup_tensor(repack_context_.get(), *slot));
    ggml_set_name(copies.back(), (*slot)->name);
  }
  repack_buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(repack_context_.get(), plan.type));
  if (!repack_buffer_) {
    throw file_.MakeError(ErrorCode::kNoMemory, "not enough memory to repack the weights");
  }
  ggml_backend_buffer_set_usage(repack_buffer_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
  for (std::size_t i = 0; i < plan.slots.size(); ++i) {
    ggml_backend_tensor_set(copies[i], (*plan.slots[i])->data, 0, ggml_nbytes(copies[i]));
    *plan.slots[i] = copies[i];
  }
}

}  // namespace fathom

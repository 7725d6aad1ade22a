// The operator of attention, around `attend.h`: it checks its inputs, rotates queries and
// keys, writes keys and values into the buffers, and lets threads attend.
#pragma once
#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "tensors.h"

namespace jetdraft {
namespace {

constexpr int64_t ROWS_OF_PART = 8, MIN_PARTS = 4, MAX_HEADS = 1 << 16;

// Query, key and value, past key and value, index of the last row, total length, cosines,
// sines, positions, bias, sinks.
constexpr int ATTENTION_TYPES[] = {ort::FLOAT, ort::FLOAT, ort::FLOAT, ort::FLOAT,
                                   ort::FLOAT, ort::INT32, ort::INT32, ort::FLOAT,
                                   ort::FLOAT, ort::INT64, ort::FLOAT, ort::FLOAT};
constexpr size_t ATTENTION_INPUTS = std::size(ATTENTION_TYPES);

struct AttentionKernel {
  int64_t heads, kv_heads, rotary, interleaved, window;
  float scale, softcap;
};

OrtStatus* create_attention(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info,
                            void** made) {
  AttentionKernel k{};
  for (auto [name, number] :
       {std::pair{"num_heads", &k.heads}, std::pair{"kv_num_heads", &k.kv_heads},
        std::pair{"do_rotary", &k.rotary}, std::pair{"rotary_interleaved", &k.interleaved},
        std::pair{"local_window_size", &k.window}})
    TRY(ort::call(ort::KERNEL_INFO_GET_ATTRIBUTE_INT64, info, name, number));
  for (auto [name, number] :
       {std::pair{"scale", &k.scale}, std::pair{"softcap", &k.softcap}})
    TRY(ort::call(ort::KERNEL_INFO_GET_ATTRIBUTE_FLOAT, info, name, number));
  if (k.kv_heads < 1 || k.heads < 1 || k.heads > MAX_HEADS || k.heads % k.kv_heads != 0)
    return failed("attention has numbers of heads that do not fit each other");
  *made = std::malloc(sizeof k);
  if (*made == nullptr) return failed("out of memory");
  std::memcpy(*made, &k, sizeof k);
  return nullptr;
}

struct AttentionJob {
  Attention a;
  AttentionKernel kernel;
  const float *q, *k, *v, *cosines, *sines;
  int64_t q_step, kv_step;  // from row to row
  bool shared;  // another layer has written keys and values: none is given
  const int64_t* positions;
  float *queries, *keys, *values;
  int64_t row_parts, head_parts;
  bool out_of_memory;
};

OrtStatus* check_rotation(const AttentionJob& job, const Tensor& cosines,
                          const Tensor& sines, const Tensor& positions) {
  const int64_t rows = job.a.rows, half = job.a.size / 2;
  if (job.a.size % 2 != 0 || !cosines.has_dims({cosines.dims[0], half}) ||
      !sines.has_dims({cosines.dims[0], half}) || !positions.has_dims({1, rows}))
    return failed("attention has tables or positions of another shape");
  for (int64_t row = 0; row < rows; row++)
    if (job.positions[row] < 0 || job.positions[row] >= cosines.dims[0])
      return failed("position %lld has no row in the tables of attention",
                    (long long)job.positions[row]);
  return nullptr;
}

// Reads the inputs, if their sizes fit each other; only they and no output are in `job`.
OrtStatus* read_attention(OrtKernelContext* context, Tensor (&inputs)[ATTENTION_INPUTS],
                          AttentionJob* job) {
  for (size_t i = 0; i < ATTENTION_INPUTS; i++)
    TRY(read_input(context, ATTENTION_TYPES[i], &inputs[i], i));
  const auto& [q, key, value, past_key, past_value, last, total, cosines, sines, positions,
               bias, sinks] = inputs;
  Attention& a = job->a;
  const AttentionKernel& k = job->kernel;
  a.heads = k.heads, a.kv_heads = k.kv_heads, a.rows = q.dims[1];
  a.capacity = past_key.dims[2], a.size = past_key.dims[3];
  if (!past_key.has_dims({1, a.kv_heads, a.capacity, a.size}) ||
      !past_value.has_dims({1, a.kv_heads, a.capacity, a.size}) || a.size < 1 ||
      a.size >= MAX_SIZE / a.heads / 4)
    return failed("attention has buffers of another shape than its heads need");
  const int64_t q_width = a.heads * a.size, kv_width = a.kv_heads * a.size;
  const bool packed = !key.given;
  job->shared = key.given && key.size == 0 && a.rows != 0;
  const int64_t kv_rows = job->shared ? 0 : a.rows;
  if (packed ? !q.has_dims({1, a.rows, q_width + 2 * kv_width})
             : !q.has_dims({1, a.rows, q_width}) || !key.has_dims({1, kv_rows, kv_width}) ||
                   !value.has_dims({1, kv_rows, kv_width}))
    return failed("attention has rows of another width than its heads need");
  if (!last.has_dims({1})) return failed("attention needs the index of its last row");
  a.cursor = *(const int32_t*)last.data + int64_t(1) - a.rows;
  if (a.cursor < 0 || a.cursor + a.rows > a.capacity)
    return failed("the rows of a pass do not fit into the buffers of attention");
  if (bias.given) {
    const int64_t heads = bias.dims[1], slots = bias.dims[3];
    if (!bias.has_dims({1, heads, a.rows, slots}) || (heads != 1 && heads != a.heads) ||
        slots < a.cursor + a.rows)
      return failed("attention has a bias of another shape");
    a.bias = (const float*)bias.data, a.bias_slots = slots;
    a.bias_head = heads == 1 ? 0 : a.rows * slots;
  }
  if (sinks.given && !sinks.has_dims({a.heads}))
    return failed("attention has sinks of another shape than its heads");
  a.sinks = (const float*)sinks.data;
  a.window = k.window, a.softcap = k.softcap;
  job->q = (const float*)q.data, job->q_step = q.dims[2];
  job->k = packed ? job->q + q_width : (const float*)key.data;
  job->v = packed ? job->k + kv_width : (const float*)value.data;
  job->kv_step = packed ? job->q_step : kv_width;
  job->cosines = (const float*)cosines.data, job->sines = (const float*)sines.data;
  job->positions = (const int64_t*)positions.data;
  return k.rotary ? check_rotation(*job, cosines, sines, positions) : nullptr;
}

// One head of one row, rotated by its position, times a factor. With fused operations, as
// onnxruntime's RotaryEmbedding, so that a graph that rotates by it has the same bits.
void rotate(const AttentionJob& job, int64_t row, const float* x, float factor, float* y) {
  const int64_t size = job.a.size, half = size / 2;
  if (!job.kernel.rotary) {
    for (int64_t i = 0; i < size; i++) y[i] = x[i] * factor;
    return;
  }
  const float* c = job.cosines + job.positions[row] * half;
  const float* s = job.sines + job.positions[row] * half;
  const int64_t step = job.kernel.interleaved ? 2 : 1;
  const int64_t other = job.kernel.interleaved ? 1 : half;
  for (int64_t i = 0; i < half; i++) {
    const float first = x[step * i], second = x[step * i + other];
    y[step * i] = __builtin_fmaf(first, c[i], -(second * s[i])) * factor;
    y[step * i + other] = __builtin_fmaf(first, s[i], second * c[i]) * factor;
  }
}

void place_row(void* data, size_t index) {
  const AttentionJob& job = *(AttentionJob*)data;
  const Attention& a = job.a;
  const int64_t row = int64_t(index);
  for (int64_t head = 0; head < a.heads; head++)
    rotate(job, row, job.q + row * job.q_step + head * a.size, job.kernel.scale,
           job.queries + (row * a.heads + head) * a.size);
  for (int64_t head = 0; head < a.kv_heads && !job.shared; head++) {
    const int64_t slot = (head * a.capacity + a.cursor + row) * a.size;
    const int64_t place = row * job.kv_step + head * a.size;
    rotate(job, row, job.k + place, 1.0f, job.keys + slot);
    std::memcpy(job.values + slot, job.v + place, a.size * sizeof(float));
  }
}

void attend_part(void* data, size_t index) {
  AttentionJob& job = *(AttentionJob*)data;
  const Attention& a = job.a;
  const int64_t rows = int64_t(index) % job.row_parts, rest = int64_t(index) / job.row_parts;
  const int64_t group = a.heads / a.kv_heads, part = rest % job.head_parts;
  const int64_t first = rest / job.head_parts * group;
  const Attention::Part p{rows * ROWS_OF_PART, std::min(a.rows, (rows + 1) * ROWS_OF_PART),
                          first + group * part / job.head_parts,
                          first + group * (part + 1) / job.head_parts};
  const int64_t lines = (p.last_row - p.first_row) * (p.last_head - p.first_head);
  const Memory memory(lines * a.line() * int64_t(sizeof(float)));
  if (memory.data == nullptr) {
    __atomic_store_n(&job.out_of_memory, true, __ATOMIC_RELAXED);
  } else {
    isa->attend(a, p, (float*)memory.data);
  }
}

OrtStatus* attend_rows(void* data, OrtKernelContext* context) {
  AttentionJob job{};
  job.kernel = *(AttentionKernel*)data;
  Attention& a = job.a;
  Tensor inputs[ATTENTION_INPUTS];
  TRY(read_attention(context, inputs, &job));
  const Tensor &past_key = inputs[3], &past_value = inputs[4];
  Tensor answer = inputs[0];
  answer.dims[2] = a.heads * a.size;
  TRY(make_output(context, answer, &a.y));
  job.keys = (float*)past_key.data, job.values = (float*)past_value.data;
  if (!job.shared) {
    TRY(make_output(context, past_key, &job.keys, 1));
    TRY(make_output(context, past_value, &job.values, 2));
  }
  for (auto [to, from] : {std::pair{job.keys, &past_key}, std::pair{job.values, &past_value}})
    if (to != from->data) std::memcpy(to, from->data, from->size * sizeof(float));
  if (a.rows == 0) return nullptr;
  const Memory queries(a.rows * answer.dims[2] * int64_t(sizeof(float)));
  job.queries = (float*)queries.data;
  if (job.queries == nullptr) return failed("out of memory");
  a.queries = job.queries, a.keys = job.keys, a.values = job.values;
  if (a.rows < ROWS_OF_PART) {
    for (int64_t row = 0; row < a.rows; row++) place_row(&job, size_t(row));
  } else {
    TRY(for_each(context, place_row, a.rows, &job));
  }
  job.row_parts = (a.rows + ROWS_OF_PART - 1) / ROWS_OF_PART;
  const int64_t parts = a.kv_heads * job.row_parts, group = a.heads / a.kv_heads;
  job.head_parts = std::clamp((MIN_PARTS + parts - 1) / parts, int64_t(1), group);
  TRY(for_each(context, attend_part, parts * job.head_parts, &job));
  return job.out_of_memory ? failed("out of memory") : nullptr;
}

}  // namespace
}  // namespace jetdraft

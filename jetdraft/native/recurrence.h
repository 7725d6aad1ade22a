// The operators of layers with a recurrent state, around `recur.h`.
//
// A narrow pass, of at most `KEPT` rows, may be committed in part. So it leaves the state
// as it was before its rows, and keeps the rows: the next pass reads how many of them are
// committed, `state_rows[0]`, and takes them first. `state_rows[1]` is the number of its own
// rows; the others are padding. A wider pass is committed whole, and keeps none.
#pragma once
#include <algorithm>
#include <cstring>
#include <iterator>

#include "tensors.h"

namespace jetdraft {
namespace {

constexpr int64_t KEPT = 16;
constexpr int64_t SMALL_STATE = 1 << 14;  // numbers that one thread reads

// Value, query, key, decay, state, kept rows, state_rows, beta.
constexpr int RECURRENCE_TYPES[] = {ort::FLOAT, ort::FLOAT, ort::FLOAT, ort::FLOAT,
                                    ort::FLOAT, ort::FLOAT, ort::INT64, ort::FLOAT};
// Rows, weights, state, state_rows, bias. The state is the window, then the kept rows.
constexpr int CONVOLUTION_TYPES[] = {ort::FLOAT, ort::FLOAT, ort::FLOAT, ort::INT64,
                                     ort::FLOAT};

OrtStatus* create_recurrent(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info,
                            void** made) {
  int64_t layout = 0;
  TRY(ort::call(ort::KERNEL_INFO_GET_ATTRIBUTE_INT64, info, "layout", &layout));
  *made = nullptr;
  return check_layout(layout);
}

struct StateRows {
  int64_t kept, rows;
};

OrtStatus* read_state_rows(const Tensor& tensor, int64_t width, StateRows* rows) {
  if (!tensor.has_dims({2})) return failed("state_rows has another shape than [2]");
  std::memcpy(rows, tensor.data, sizeof *rows);
  if (rows->kept >= 0 && rows->kept <= KEPT && rows->rows >= 0 && rows->rows <= width)
    return nullptr;
  return failed("state_rows are %lld and %lld, in a pass of %lld rows",
                (long long)rows->kept, (long long)rows->rows, (long long)width);
}

// Makes an output with the numbers of an input, which may lie in the same place.
OrtStatus* copy_input(OrtKernelContext* context, const Tensor& tensor, float** data,
                      size_t index) {
  TRY(make_output(context, tensor, data, index));
  if (*data != tensor.data)
    std::memcpy(*data, tensor.data, size_t(tensor.size) * sizeof(float));
  return nullptr;
}

struct RecurrenceJob {
  Recurrence r;
  bool out_of_memory;
};

void take_rows(void* data, size_t head) {
  RecurrenceJob& job = *(RecurrenceJob*)data;
  const int64_t size = job.r.key * Recurrence::COLUMNS * int64_t(sizeof(float));
  const Memory scratch(size);
  if (scratch.data == nullptr) {
    __atomic_store_n(&job.out_of_memory, true, __ATOMIC_RELAXED);
  } else {
    isa->recur(job.r, int64_t(head), (float*)scratch.data);
  }
}

OrtStatus* run_linear_attention(void*, OrtKernelContext* context) {
  constexpr size_t count = std::size(RECURRENCE_TYPES);
  Tensor inputs[count];
  for (size_t i = 0; i < count; i++)
    TRY(read_input(context, RECURRENCE_TYPES[i], &inputs[i], i));
  const auto& [value, query, key, decay, state, kept, state_rows, beta] = inputs;
  RecurrenceJob job{};
  Recurrence& r = job.r;
  const int64_t n = value.dims[1];
  r.heads = state.dims[1], r.key = state.dims[2], r.value = state.dims[3];
  if (!state.has_dims({1, r.heads, r.key, r.value}) || state.size < 1)
    return failed("linear attention has a state of another shape");
  const int64_t keys = key.dims[2], values = r.heads * r.value;
  r.key_heads = keys / r.key;
  if (r.key_heads < 1 || keys % r.key != 0 || r.heads % r.key_heads != 0)
    return failed("linear attention has keys of another width than its heads need");
  const int64_t size = keys + values + r.heads * (beta.given ? 2 : 1);
  if (!query.has_dims({1, n, keys}) || !key.has_dims({1, n, keys}) ||
      !value.has_dims({1, n, values}) || !decay.has_dims({1, n, r.heads}) ||
      (beta.given && !beta.has_dims({1, n, r.heads})) || !kept.has_dims({1, KEPT, size}))
    return failed("linear attention has rows of another width than its heads need");
  StateRows rows;
  TRY(read_state_rows(state_rows, n, &rows));
  float *y = nullptr, *kept_rows = nullptr;
  TRY(make_output(context, value, &y));
  TRY(copy_input(context, state, &r.states, 1));
  TRY(copy_input(context, kept, &kept_rows, 2));

  r.count = rows.kept + rows.rows, r.lasting = n > KEPT ? r.count : rows.kept;
  const Memory memory(std::max<int64_t>(1, r.count) * int64_t(sizeof(Recurrence::Row)));
  auto* row = (Recurrence::Row*)memory.data;
  if (row == nullptr) return failed("out of memory");
  r.rows = row;
  const auto at = [](const Tensor& x, int64_t t) {
    return x.given ? (const float*)x.data + t * x.dims[2] : nullptr;
  };
  for (int64_t t = 0; t < rows.kept; t++) {
    const float *k = kept_rows + t * size, *gates = k + keys + values;
    *row++ = {nullptr, k, k + keys, gates, beta.given ? gates + r.heads : nullptr, nullptr};
  }
  for (int64_t t = 0; t < rows.rows; t++)
    *row++ = {at(query, t), at(key, t), at(value, t), at(decay, t), at(beta, t),
              y + t * values};
  std::fill(y + rows.rows * values, y + n * values, 0.0f);
  if (r.count > 0) {
    if (state.size < SMALL_STATE) {
      for (int64_t head = 0; head < r.heads; head++) take_rows(&job, size_t(head));
    } else {
      TRY(for_each(context, take_rows, r.heads, &job));
    }
  }
  if (job.out_of_memory) return failed("out of memory");
  if (n > KEPT) return nullptr;
  for (int64_t t = 0; t < rows.rows; t++)
    for (const Tensor* part : {&key, &value, &decay, &beta}) {
      if (!part->given) continue;
      std::memcpy(kept_rows, at(*part, t), size_t(part->dims[2]) * sizeof(float));
      kept_rows += part->dims[2];
    }
  return nullptr;
}

void convolve_row(void* data, size_t row) {
  isa->convolve(*(const Convolution*)data, int64_t(row));
}

OrtStatus* run_convolution(void*, OrtKernelContext* context) {
  constexpr size_t count = std::size(CONVOLUTION_TYPES);
  Tensor inputs[count];
  for (size_t i = 0; i < count; i++)
    TRY(read_input(context, CONVOLUTION_TYPES[i], &inputs[i], i));
  const auto& [x, weights, state, state_rows, bias] = inputs;
  Convolution c;
  const int64_t n = x.dims[1];
  c.size = weights.dims[0], c.channels = weights.dims[1];
  if (!weights.has_dims({c.size, c.channels}) || weights.size < 1 ||
      !x.has_dims({1, n, c.channels}) ||
      !state.has_dims({1, c.size - 1 + KEPT, c.channels}) ||
      (bias.given && !bias.has_dims({c.channels})))
    return failed("a convolution has another shape than its weights need");
  StateRows rows;
  TRY(read_state_rows(state_rows, n, &rows));
  float* window = nullptr;
  TRY(make_output(context, x, &c.y));
  TRY(copy_input(context, state, &window, 1));
  c.window = window + rows.kept * c.channels, c.rows = (const float*)x.data;
  c.weights = (const float*)weights.data, c.bias = (const float*)bias.data;
  if (n * c.channels < SMALL_STATE) {
    for (int64_t row = 0; row < n; row++) isa->convolve(c, row);
  } else {
    TRY(for_each(context, convolve_row, n, &c));
  }
  // A row moves to a place that no later row is read from.
  const int64_t first = n > KEPT ? rows.rows : 0;
  const int64_t last = c.size - 1 + (n > KEPT ? 0 : rows.rows);
  for (int64_t i = 0; i < last; i++)
    std::memmove(window + i * c.channels, c.row(first + i),
                 size_t(c.channels) * sizeof(float));
  return nullptr;
}

}  // namespace
}  // namespace jetdraft

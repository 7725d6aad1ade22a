// What the operators share: errors, tensors of onnxruntime, threads and memory.
//
// A bundle may come from anywhere, so nothing is read before its size, its type and its
// alignment are checked. Only library.cpp includes this header.
#pragma once
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "format.h"
#include "ort.h"

namespace jetdraft {
namespace {

constexpr int INVALID_ARGUMENT = 2, MAX_AXES = 8;
constexpr int64_t MAX_SIZE = int64_t(1) << 31;

const Isa* isa;  // what the operators use

__attribute__((format(printf, 1, 2))) OrtStatus* failed(const char* format, ...) {
  char reason[256];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(reason, sizeof reason, format, arguments);
  va_end(arguments);
  return ort::call(ort::CREATE_STATUS, INVALID_ARGUMENT, (const char*)reason);
}

#define TRY(expression) \
  if (OrtStatus* status = (expression)) return status

OrtStatus* check_layout(int64_t layout) {
  if (layout == LAYOUT_VERSION) return nullptr;
  return failed("the bundle is packed in layout %lld, and this version reads layout %d; "
                "export the bundle again",
                (long long)layout, LAYOUT_VERSION);
}

struct Tensor {
  void* data;
  int64_t dims[MAX_AXES];
  size_t rank;
  int64_t size;
  bool given;  // not an input that is left out

  bool has_dims(std::initializer_list<int64_t> sizes) const {
    return given && rank == sizes.size() && std::equal(sizes.begin(), sizes.end(), dims);
  }
};

OrtStatus* read_tensor(const OrtValue* value, int type, Tensor* tensor) {
  *tensor = {};
  if (value == nullptr) return nullptr;
  OrtTensorTypeAndShapeInfo* info = nullptr;
  TRY(ort::call(ort::GET_TENSOR_TYPE_AND_SHAPE, value, &info));
  int found = 0;
  ort::call(ort::GET_TENSOR_ELEMENT_TYPE, (const OrtTensorTypeAndShapeInfo*)info, &found);
  ort::call(ort::GET_DIMENSIONS_COUNT, (const OrtTensorTypeAndShapeInfo*)info,
            &tensor->rank);
  const bool fits = tensor->rank <= MAX_AXES;
  if (fits)
    ort::call(ort::GET_DIMENSIONS, (const OrtTensorTypeAndShapeInfo*)info, tensor->dims,
              tensor->rank);
  ort::call<void>(ort::RELEASE_TENSOR_TYPE_AND_SHAPE_INFO, info);
  if (!fits) return failed("an input has more than 8 axes");
  if (found != type) return failed("an input has another type than declared");
  tensor->size = 1;
  for (size_t axis = 0; axis < tensor->rank; axis++)
    if (__builtin_mul_overflow(tensor->size, tensor->dims[axis], &tensor->size))
      return failed("an input is too large");
  tensor->given = true;
  TRY(ort::call(ort::GET_TENSOR_MUTABLE_DATA, (OrtValue*)value, &tensor->data));
  const uintptr_t alignment = type == ort::UINT8 ? 1 : type == ort::INT64 ? 8 : 4;
  if ((uintptr_t)tensor->data % alignment == 0) return nullptr;
  return failed("an input does not begin at a multiple of its numbers' size");
}

OrtStatus* input(OrtKernelContext* context, size_t index, const OrtValue** value) {
  return ort::call(ort::KERNEL_CONTEXT_GET_INPUT, (const OrtKernelContext*)context, index,
                   value);
}

OrtStatus* read_input(OrtKernelContext* context, int type, Tensor* tensor,
                      size_t index = 0) {
  const OrtValue* value = nullptr;
  TRY(input(context, index, &value));
  return read_tensor(value, type, tensor);
}

OrtStatus* make_output(OrtKernelContext* context, const Tensor& shape, float** data,
                       size_t index = 0) {
  OrtValue* value = nullptr;
  TRY(ort::call(ort::KERNEL_CONTEXT_GET_OUTPUT, context, index,
                (const int64_t*)shape.dims, shape.rank, &value));
  if (value == nullptr) return failed("output %zu is missing", index);
  return ort::call(ort::GET_TENSOR_MUTABLE_DATA, value, (void**)data);
}

OrtStatus* for_each(OrtKernelContext* context, void (*function)(void*, size_t),
                    int64_t count, void* data) {
  return ort::call(ort::KERNEL_CONTEXT_PARALLEL_FOR, (const OrtKernelContext*)context,
                   function, size_t(count), size_t(0), data);
}

struct Memory {
  void* data;
  explicit Memory(int64_t bytes)
      : data(std::aligned_alloc(64, size_t(round_up(bytes, 64)))) {}
  Memory(const Memory&) = delete;
  ~Memory() { std::free(data); }
};

}  // namespace
}  // namespace jetdraft

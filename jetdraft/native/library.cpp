// Operators for onnxruntime's CPU provider, in the domain "jetdraft":
//
//   MatMulPacked(x float [..., K], integers, scales uint8 [bytes]) -> float [..., N]
//   GatherPacked(ids int64 [...], integers, scales) -> float [..., K]: columns
//   GroupQueryAttention: onnxruntime's operator of this name with its inputs up to the
//       bias, for floats, one sequence, and past and present in the same buffers
//
// Attributes of the first two: N, K, format (a row of FORMATS), layout (LAYOUT_VERSION).
// A bundle may come from anywhere, so nothing is read before its size and type are
// checked.
//
// The library needs no C++ runtime: neither exceptions nor containers.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <utility>

#include "format.h"
#include "ort.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace jetdraft {
namespace {

constexpr int INVALID_ARGUMENT = 2, MAX_AXES = 8;
constexpr int64_t MAX_SIZE = int64_t(1) << 31;
constexpr int64_t PARTS = 16;             // of a product, for the session's threads
constexpr int64_t SMALL_BYTES = 1 << 15;  // of a matrix that one thread multiplies

// The best that runs here, or the one that JETDRAFT_ISA names; null if it cannot run.
const Isa* choose_isa() {
  const char* forced = std::getenv("JETDRAFT_ISA");
  for (const Isa* const* isa = ISAS; *isa != nullptr; isa++)
    if ((*isa)->runs() && (forced == nullptr || std::strcmp(forced, (*isa)->name) == 0))
      return *isa;
  return nullptr;
}

const Isa* isa;

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

struct Tensor {
  void* data;
  int64_t dims[MAX_AXES];
  size_t rank;
  int64_t size;
};

// An input that is left out has no data.
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
  return ort::call(ort::GET_TENSOR_MUTABLE_DATA, (OrtValue*)value, &tensor->data);
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
  return ort::call(ort::GET_TENSOR_MUTABLE_DATA, value, (void**)data);
}

struct Kernel {
  int64_t columns, numbers, padded, format;

  int64_t groups() const { return (columns + GROUP - 1) / GROUP; }
  int64_t units() const {
    return padded / (has_supers(FORMATS[format].scales) ? SUPER : BLOCK);
  }
  // Reads an array of the matrix, which is input 1 or 2, if it has this kernel's size.
  OrtStatus* read_array(const OrtValue* value, size_t index, Tensor* tensor) const {
    TRY(read_tensor(value, ort::UINT8, tensor));
    const Format& f = FORMATS[format];
    const int64_t size = index == 1 ? padded / BLOCK * block_bytes(f.bits)
                                    : units() * scale_bytes(f.scales);
    if (tensor->size == groups() * size) return nullptr;
    return failed("a packed matrix has another size than its columns and rows need; "
                  "export the bundle again");
  }
  OrtStatus* read_matrix(OrtKernelContext* context, const uint8_t** integers,
                         const uint8_t** scales) const {
    Tensor tensors[2];
    for (size_t index : {1, 2}) {
      const OrtValue* value = nullptr;
      TRY(input(context, index, &value));
      TRY(read_array(value, index, &tensors[index - 1]));
    }
    *integers = (const uint8_t*)tensors[0].data;
    *scales = (const uint8_t*)tensors[1].data;
    return nullptr;
  }
};

OrtStatus* create(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info,
                  void** made) {
  int64_t layout = 0;
  Kernel k{};
  for (auto [name, number] : {std::pair{"N", &k.columns}, std::pair{"K", &k.numbers},
                              std::pair{"format", &k.format}, std::pair{"layout", &layout}})
    TRY(ort::call(ort::KERNEL_INFO_GET_ATTRIBUTE_INT64, info, name, number));
  if (layout != LAYOUT_VERSION)
    return failed("the bundle is packed in layout %lld, and this version reads layout %d; "
                  "export the bundle again",
                  (long long)layout, LAYOUT_VERSION);
  if (k.format < 0 || k.format >= FORMAT_COUNT) return failed("unknown format of a matrix");
  if (k.columns < 1 || k.numbers < 1 || k.columns >= MAX_SIZE || k.numbers >= MAX_SIZE)
    return failed("a matrix has a size out of range");
  k.padded = round_up(k.numbers, has_supers(FORMATS[k.format].scales) ? SUPER : BLOCK);
  // Constants are checked when the session opens; others, in each pass, as these are.
  for (size_t index : {1, 2}) {
    int is_constant = 0;
    const OrtValue* value = nullptr;
    Tensor array;
    TRY(ort::call(ort::KERNEL_INFO_GET_CONSTANT_INPUT_TENSOR, info, index, &is_constant,
                  &value));
    if (is_constant) TRY(k.read_array(value, index, &array));
  }
  *made = std::malloc(sizeof k);
  if (*made == nullptr) return failed("out of memory");
  std::memcpy(*made, &k, sizeof k);
  return nullptr;
}

OrtStatus* for_each(OrtKernelContext* context, void (*function)(void*, size_t),
                    int64_t count, void* data) {
  return ort::call(ort::KERNEL_CONTEXT_PARALLEL_FOR, (const OrtKernelContext*)context,
                   function, size_t(count), size_t(0), data);
}

struct Job {
  Product product;
  int64_t format, groups, parts;
};

void quantize_row(void* data, size_t row) {
  const Job& job = *(Job*)data;
  isa->quantize[job.format](job.product, int64_t(row));
}

void multiply_part(void* data, size_t part) {
  const Job& job = *(Job*)data;
  const int64_t from = job.groups * int64_t(part) / job.parts,
                to = job.groups * int64_t(part + 1) / job.parts;
  isa->multiply[job.format](job.product, from, to);
}

struct Memory {
  void* data;
  explicit Memory(int64_t bytes)
      : data(std::aligned_alloc(64, size_t(round_up(bytes, 64)))) {}
  Memory(const Memory&) = delete;
  ~Memory() { std::free(data); }
};

OrtStatus* multiply_packed(void* data, OrtKernelContext* context) {
  const Kernel& k = *(Kernel*)data;
  Tensor x;
  Job job{};
  Product& p = job.product;
  TRY(read_input(context, ort::FLOAT, &x));
  TRY(k.read_matrix(context, &p.integers, &p.scales));
  if (x.rank < 1 || x.dims[x.rank - 1] != k.numbers)
    return failed("the rows have another width than the matrix");
  p.columns = k.columns, p.numbers = k.numbers, p.padded = k.padded;
  p.x = (const float*)x.data, p.rows = x.size / k.numbers;
  x.dims[x.rank - 1] = k.columns;
  TRY(make_output(context, x, &p.y));
  if (p.rows == 0) return nullptr;

  const Memory memory(p.rows * (k.padded / BLOCK) * int64_t(sizeof(RowBlock)));
  p.read = (RowBlock*)memory.data;
  if (p.read == nullptr) return failed("out of memory");
  job.format = k.format, job.groups = k.groups();
  const int64_t size = k.columns * k.padded;
  job.parts = size < SMALL_BYTES ? 1 : std::min(PARTS, job.groups);
  if (p.rows < 4 || job.parts == 1) {
    for (int64_t row = 0; row < p.rows; row++) quantize_row(&job, size_t(row));
  } else {
    TRY(for_each(context, quantize_row, p.rows, &job));
  }
  if (job.parts == 1) return multiply_part(&job, 0), nullptr;
  return for_each(context, multiply_part, job.parts, &job);
}

float half_at(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, sizeof bits);
  _Float16 half;
  std::memcpy(&half, &bits, sizeof half);
  return float(half);
}

// One column of a packed matrix as floats.
void unpack_column(const Kernel& k, const uint8_t* integers, const uint8_t* scales,
                   int64_t column, float* y) {
  const Format& f = FORMATS[k.format];
  const int64_t group = column / GROUP, c = column % GROUP, blocks = k.padded / BLOCK;
  for (int64_t i = 0; i < k.numbers; i++) {
    const int64_t b = i / BLOCK, t = i % BLOCK / 4, place = 4 * c + i % 4;
    const uint8_t* w = integers + (group * blocks + b) * block_bytes(f.bits);
    int q = f.bits == 8 ? (int8_t)w[64 * t + place] : w[64 * (t / 2) + place] >> 4 * (t % 2) & 15;
    if (f.bits == 5) q |= (w[256 + place] >> t & 1) << 4;
    if (f.bits == 6) q |= (w[256 + 64 * (t / 4) + place] >> 2 * (t % 4) & 3) << 4;
    const int64_t unit = has_supers(f.scales) ? i / SUPER : b, inner = i % SUPER / BLOCK;
    const uint8_t* s = scales + (group * k.units() + unit) * scale_bytes(f.scales);
    const float d = half_at(s + 2 * c);
    switch (f.scales) {
      case Scales::HALF:
        y[i] = d * float(q - f.zero);
        break;
      case Scales::HALF_MIN:
        y[i] = d * float(q) + half_at(s + 32 + 2 * c);
        break;
      case Scales::SUPER_MIN:
        y[i] = d * float(s[64 + 16 * inner + c]) * float(q) -
               half_at(s + 32 + 2 * c) * float(s[192 + 16 * inner + c]);
        break;
      case Scales::SUPER_HALVES:
        y[i] = d * float((int8_t)s[32 + 16 * (i % SUPER / 16) + c]) * float(q - f.zero);
    }
  }
}

OrtStatus* gather_packed(void* data, OrtKernelContext* context) {
  const Kernel& k = *(Kernel*)data;
  Tensor ids;
  const uint8_t *integers, *scales;
  TRY(read_input(context, ort::INT64, &ids));
  TRY(k.read_matrix(context, &integers, &scales));
  if (ids.rank == MAX_AXES) return failed("the ids have too many axes");
  const auto* id = (const int64_t*)ids.data;
  for (int64_t i = 0; i < ids.size; i++)
    if (id[i] < 0 || id[i] >= k.columns)
      return failed("the id %lld is not in the vocabulary of %lld tokens",
                    (long long)id[i], (long long)k.columns);
  Tensor shape = ids;
  shape.dims[shape.rank++] = k.numbers;
  float* y = nullptr;
  TRY(make_output(context, shape, &y));
  for (int64_t i = 0; i < ids.size; i++)
    unpack_column(k, integers, scales, id[i], y + i * k.numbers);
  return nullptr;
}

// --- attention ------------------------------------------------------------------------

constexpr int64_t ROWS_OF_PART = 8, MIN_PARTS = 4;  // of attention

struct AttentionKernel {
  int64_t heads, kv_heads, rotary, interleaved, window;
  float scale;
};

OrtStatus* create_attention(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info,
                            void** made) {
  AttentionKernel k{};
  for (auto [name, number] :
       {std::pair{"num_heads", &k.heads}, std::pair{"kv_num_heads", &k.kv_heads},
        std::pair{"do_rotary", &k.rotary}, std::pair{"rotary_interleaved", &k.interleaved},
        std::pair{"local_window_size", &k.window}})
    TRY(ort::call(ort::KERNEL_INFO_GET_ATTRIBUTE_INT64, info, name, number));
  TRY(ort::call(ort::KERNEL_INFO_GET_ATTRIBUTE_FLOAT, info, "scale", &k.scale));
  if (k.kv_heads < 1 || k.heads < 1 || k.heads >= MAX_SIZE || k.heads % k.kv_heads != 0)
    return failed("attention has numbers of heads that do not fit each other");
  *made = std::malloc(sizeof k);
  if (*made == nullptr) return failed("out of memory");
  std::memcpy(*made, &k, sizeof k);
  return nullptr;
}

struct AttentionJob {
  Attention a;
  const AttentionKernel* kernel;
  const float *q, *k, *v, *cosines, *sines;
  int64_t q_step, kv_step;
  const int64_t* positions;
  float *queries, *keys, *values;
  int64_t row_parts, head_parts;
  bool out_of_memory;
};

// One head of one row, rotated by its position.
void rotate(const AttentionJob& job, int64_t row, const float* x, float* y) {
  const int64_t size = job.a.size, half = size / 2;
  if (!job.kernel->rotary) return (void)std::memcpy(y, x, size * sizeof(float));
  const float* c = job.cosines + job.positions[row] * half;
  const float* s = job.sines + job.positions[row] * half;
  const int64_t step = job.kernel->interleaved ? 2 : 1;
  const int64_t other = job.kernel->interleaved ? 1 : half;
  for (int64_t i = 0; i < half; i++) {
    const float first = x[step * i], second = x[step * i + other];
    y[step * i] = first * c[i] - second * s[i];
    y[step * i + other] = second * c[i] + first * s[i];
  }
}

void place_row(void* data, size_t index) {
  const AttentionJob& job = *(AttentionJob*)data;
  const Attention& a = job.a;
  const int64_t row = int64_t(index);
  for (int64_t head = 0; head < a.heads; head++)
    rotate(job, row, job.q + row * job.q_step + head * a.size,
           job.queries + (row * a.heads + head) * a.size);
  for (int64_t head = 0; head < a.kv_heads; head++) {
    const int64_t slot = (head * a.capacity + a.cursor + row) * a.size;
    rotate(job, row, job.k + row * job.kv_step + head * a.size, job.keys + slot);
    std::memcpy(job.values + slot, job.v + row * job.kv_step + head * a.size,
                a.size * sizeof(float));
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
    job.out_of_memory = true;
  } else {
    isa->attend(a, p, (float*)memory.data);
  }
}

bool has_dims(const Tensor& tensor, std::initializer_list<int64_t> dims) {
  return tensor.data != nullptr && tensor.rank == dims.size() &&
         std::equal(dims.begin(), dims.end(), tensor.dims);
}

OrtStatus* attend_rows(void* data, OrtKernelContext* context) {
  const AttentionKernel& k = *(AttentionKernel*)data;
  Tensor inputs[11];
  constexpr int types[] = {ort::FLOAT, ort::FLOAT, ort::FLOAT, ort::FLOAT,
                           ort::FLOAT, ort::INT32, ort::INT32, ort::FLOAT,
                           ort::FLOAT, ort::INT64, ort::FLOAT};
  for (size_t i = 0; i < std::size(inputs); i++)
    TRY(read_input(context, types[i], &inputs[i], i));
  const auto& [q, key, value, past_key, past_value, last, total, cosines, sines, positions,
               bias] = inputs;
  AttentionJob job{};
  Attention& a = job.a;
  if (past_key.rank != 4 || q.rank != 3) return failed("attention has inputs of another rank");
  a.heads = k.heads, a.kv_heads = k.kv_heads, a.rows = q.dims[1];
  a.capacity = past_key.dims[2], a.size = past_key.dims[3];
  if (!has_dims(past_key, {1, a.kv_heads, a.capacity, a.size}) ||
      !has_dims(past_value, {1, a.kv_heads, a.capacity, a.size}) || a.size < 1 ||
      a.size % Attention::LANES != 0 || a.size >= MAX_SIZE / a.heads / 4)
    return failed("attention has buffers of another shape than its heads need");
  const int64_t q_width = a.heads * a.size, kv_width = a.kv_heads * a.size;
  const bool packed = key.data == nullptr;
  if (packed ? !has_dims(q, {1, a.rows, q_width + 2 * kv_width})
             : !has_dims(q, {1, a.rows, q_width}) ||
                   !has_dims(key, {1, a.rows, kv_width}) ||
                   !has_dims(value, {1, a.rows, kv_width}))
    return failed("attention has rows of another width than its heads need");
  if (!has_dims(last, {1})) return failed("attention needs the index of its last row");
  a.cursor = *(const int32_t*)last.data + int64_t(1) - a.rows;
  if (a.cursor < 0 || a.cursor + a.rows > a.capacity)
    return failed("the rows of a pass do not fit into the buffers of attention");
  if (k.rotary) {
    if (cosines.rank != 2 || !has_dims(cosines, {cosines.dims[0], a.size / 2}) ||
        !has_dims(sines, {cosines.dims[0], a.size / 2}) || !has_dims(positions, {1, a.rows}))
      return failed("attention has tables or positions of another shape");
    job.positions = (const int64_t*)positions.data;
    for (int64_t row = 0; row < a.rows; row++)
      if (job.positions[row] < 0 || job.positions[row] >= cosines.dims[0])
        return failed("position %lld has no row in the tables of attention",
                      (long long)job.positions[row]);
  }
  if (bias.data != nullptr) {
    if (bias.rank != 4 || !has_dims(bias, {1, bias.dims[1], a.rows, bias.dims[3]}) ||
        (bias.dims[1] != 1 && bias.dims[1] != a.heads) ||
        bias.dims[3] < a.cursor + a.rows)
      return failed("attention has a bias of another shape");
    a.bias_slots = bias.dims[3];
    a.bias_head = bias.dims[1] == 1 ? 0 : a.rows * a.bias_slots;
  }
  Tensor shape = q;
  shape.dims[2] = q_width;
  TRY(make_output(context, shape, &a.y));
  TRY(make_output(context, past_key, &job.keys, 1));
  TRY(make_output(context, past_value, &job.values, 2));
  if (a.rows == 0) return nullptr;
  for (auto [to, from] : {std::pair{job.keys, &past_key}, std::pair{job.values, &past_value}})
    if (to != from->data) std::memcpy(to, from->data, from->size * sizeof(float));

  const Memory queries(a.rows * q_width * int64_t(sizeof(float)));
  if (queries.data == nullptr) return failed("out of memory");
  job.kernel = &k;
  job.q = (const float*)q.data;
  job.k = packed ? job.q + q_width : (const float*)key.data;
  job.v = packed ? job.k + kv_width : (const float*)value.data;
  job.q_step = q.dims[2], job.kv_step = packed ? q.dims[2] : kv_width;
  job.cosines = (const float*)cosines.data, job.sines = (const float*)sines.data;
  job.queries = (float*)queries.data;
  a.queries = job.queries, a.keys = job.keys, a.values = job.values;
  a.bias = (const float*)bias.data, a.scale = k.scale, a.window = k.window;
  if (a.rows < ROWS_OF_PART) {
    for (int64_t row = 0; row < a.rows; row++) place_row(&job, size_t(row));
  } else {
    TRY(for_each(context, place_row, a.rows, &job));
  }
  job.row_parts = (a.rows + ROWS_OF_PART - 1) / ROWS_OF_PART;
  const int64_t parts = a.kv_heads * job.row_parts;
  job.head_parts = std::clamp((MIN_PARTS + parts - 1) / parts, int64_t(1), a.heads / a.kv_heads);
  TRY(for_each(context, attend_part, parts * job.head_parts, &job));
  return job.out_of_memory ? failed("out of memory") : nullptr;
}

// --- registration ---------------------------------------------------------------------

using Create = OrtStatus*(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void**);
using Compute = OrtStatus*(void*, OrtKernelContext*);

constexpr int OPTIONAL = 1;

template <Create* CREATE, Compute* COMPUTE, int OUTPUTS, int... TYPES>
OrtCustomOp make_operator(const char* (*name)(const OrtCustomOp*)) {
  OrtCustomOp op{};
  op.version = ort::VERSION;
  op.GetName = name;
  op.GetExecutionProviderType = [](auto) { return "CPUExecutionProvider"; };
  op.GetInputTypeCount = [](auto) { return sizeof...(TYPES); };
  op.GetInputType = [](auto, size_t i) {
    constexpr int types[] = {TYPES...};
    return types[i];
  };
  op.GetOutputTypeCount = [](auto) { return size_t(OUTPUTS); };
  op.GetOutputType = [](auto, size_t) { return int(ort::FLOAT); };
  op.KernelDestroy = [](void* kernel) { std::free(kernel); };
  // Of the operators here only attention has inputs that can be left out.
  op.GetInputCharacteristic = [](auto, size_t i) {
    return OUTPUTS > 1 && i != 0 && (i < 3 || i > 6) ? OPTIONAL : 0;
  };
  op.GetOutputCharacteristic = [](auto, size_t) { return 0; };
  op.GetInputMemoryType = [](auto, size_t) { return 0; };
  op.GetVariadicInputMinArity = op.GetVariadicOutputMinArity = [](auto) { return 1; };
  op.GetVariadicInputHomogeneity = op.GetVariadicOutputHomogeneity = [](auto) { return 1; };
  op.CreateKernelV2 = CREATE;
  op.KernelComputeV2 = COMPUTE;
  op.GetStartVersion = op.GetEndVersion = [](auto) { return 1; };
  op.GetMayInplace = op.GetAliasMap = [](int**, int**) { return size_t(0); };
  op.ReleaseMayInplace = op.ReleaseAliasMap = [](int*, int*) {};
  return op;
}

}  // namespace
}  // namespace jetdraft

// The name of the instructions that products use here; null if JETDRAFT_ISA names some
// that this processor lacks.
EXPORTED const char* jetdraft_isa() {
  const jetdraft::Isa* isa = jetdraft::choose_isa();
  return isa == nullptr ? nullptr : isa->name;
}

EXPORTED OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  using namespace jetdraft;
  ort::api = base->GetApi(ort::VERSION);
  isa = choose_isa();
  if (isa == nullptr)
    return failed("this processor lacks what JETDRAFT_ISA names; leave it out");
  static const OrtCustomOp multiply = make_operator<create, multiply_packed, 1, ort::FLOAT, ort::UINT8, ort::UINT8>(
      [](auto) { return "MatMulPacked"; });
  static const OrtCustomOp gather = make_operator<create, gather_packed, 1, ort::INT64, ort::UINT8, ort::UINT8>(
      [](auto) { return "GatherPacked"; });
  using namespace ort;
  static const OrtCustomOp attention =
      make_operator<create_attention, attend_rows, 3, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT,
                    INT32, INT32, FLOAT, FLOAT, INT64, FLOAT>(
          [](auto) { return "GroupQueryAttention"; });
  OrtCustomOpDomain* domain = nullptr;
  TRY(ort::call(ort::CREATE_CUSTOM_OP_DOMAIN, "jetdraft", &domain));
  for (const OrtCustomOp* op : {&multiply, &gather, &attention})
    TRY(ort::call(ort::CUSTOM_OP_DOMAIN_ADD, domain, op));
  return ort::call(ort::ADD_CUSTOM_OP_DOMAIN, options, domain);
}

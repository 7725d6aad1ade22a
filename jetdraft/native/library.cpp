// Operators for onnxruntime's CPU provider, in the domain "jetdraft":
//
//   MatMulPacked(x float [..., K], integers, scales uint8 [bytes], bias float [N] or none)
//       -> float [..., N]
//   MatMulGated: the same for x [..., 2 K], gates g and numbers, which are multiplied with
//       g / (1 + e^-z), z = linear g + cubic g^3
//   GatherPacked(ids int64 [...], integers, scales) -> float [..., K]: columns
//   MatMulExperts(x float [S, K], integers, scales, ids int64 [S]) -> float [S, N]: the
//       arrays have a matrix for each expert, one behind the other, and row s is
//       multiplied with the matrix ids[s]
//   GroupQueryAttention: onnxruntime's operator of this name with its inputs up to the
//       sinks, for floats and one sequence, with all attributes but those of 0
//   LinearAttention(value float [1, n, heads * value], query, key [1, n, key_heads * key],
//       decay [1, n, heads], state [1, heads, key, value], kept rows [1, KEPT, all of a row
//       but the query], state_rows int64 [2], beta like decay or none) -> float like value,
//       state, kept rows
//   CausalConvolution(x float [1, n, c], weights [k, c], state [1, k - 1 + KEPT, c],
//       state_rows int64 [2], bias [c] or none) -> float [1, n, c], state
//
// Attributes of all but attention: layout (LAYOUT_VERSION); of the first four: N, K, format
// (a row of FORMATS); of MatMulGated also linear and cubic.
//
// The library needs no C++ runtime: neither exceptions nor containers.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <utility>

#include "attention.h"
#include "format.h"
#include "ort.h"
#include "recurrence.h"
#include "tensors.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace jetdraft {
namespace {

constexpr int64_t PARTS = 16;             // of a product, for the session's threads
constexpr int64_t SMALL_BYTES = 1 << 15;  // of a matrix that one thread multiplies
constexpr int64_t FEW_ROWS = 4;           // Fewer without gates are for one thread.
constexpr int64_t ROW_PARTS = 4;          // of a row with gates beside few others

// The best that runs here, or the one that JETDRAFT_ISA names; null if it cannot run.
const Isa* choose_isa() {
  const char* forced = std::getenv("JETDRAFT_ISA");
  for (const Isa* const* isa = ISAS; *isa != nullptr; isa++)
    if ((*isa)->runs() && (forced == nullptr || std::strcmp(forced, (*isa)->name) == 0))
      return *isa;
  return nullptr;
}

struct Kernel {
  int64_t columns, numbers, padded, format;
  bool is_stack;  // of a matrix for each expert
  bool is_gated;
  float linear, cubic;

  int64_t groups() const { return (columns + GROUP - 1) / GROUP; }
  int64_t units() const {
    return padded / (has_supers(FORMATS[format].scales) ? SUPER : BLOCK);
  }
  // Bytes of an array of one matrix, which is input 1 or 2.
  int64_t bytes(size_t index) const {
    const Format& f = FORMATS[format];
    return groups() * (index == 1 ? padded / BLOCK * block_bytes(f.bits)
                                  : units() * scale_bytes(f.scales));
  }
  // Reads an array if it has this kernel's size.
  OrtStatus* read_array(const OrtValue* value, size_t index, Tensor* tensor) const {
    TRY(read_tensor(value, ort::UINT8, tensor));
    const int64_t size = bytes(index);
    if (tensor->size == size || (is_stack && tensor->size > 0 && tensor->size % size == 0))
      return nullptr;
    return failed("a packed matrix has another size than its columns and rows need; "
                  "export the bundle again");
  }
  // Reads both arrays, and how many matrices they have.
  OrtStatus* read_matrix(OrtKernelContext* context, const uint8_t** integers,
                         const uint8_t** scales, int64_t* count) const {
    Tensor tensors[2];
    for (size_t index : {1, 2}) {
      const OrtValue* value = nullptr;
      TRY(input(context, index, &value));
      TRY(read_array(value, index, &tensors[index - 1]));
    }
    *integers = (const uint8_t*)tensors[0].data;
    *scales = (const uint8_t*)tensors[1].data;
    *count = tensors[0].size / bytes(1);
    if (*count == tensors[1].size / bytes(2)) return nullptr;
    return failed("packed experts have more integers than scales, or fewer; export the "
                  "bundle again");
  }
};

template <bool IS_STACK, bool IS_GATED = false>
OrtStatus* create(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info,
                  void** made) {
  int64_t layout = 0;
  Kernel k{};
  k.is_stack = IS_STACK, k.is_gated = IS_GATED;
  for (auto [name, number] : {std::pair{"N", &k.columns}, std::pair{"K", &k.numbers},
                              std::pair{"format", &k.format}, std::pair{"layout", &layout}})
    TRY(ort::call(ort::KERNEL_INFO_GET_ATTRIBUTE_INT64, info, name, number));
  TRY(check_layout(layout));
  if constexpr (IS_GATED)
    for (auto [name, factor] :
         {std::pair{"linear", &k.linear}, std::pair{"cubic", &k.cubic}})
      TRY(ort::call(ort::KERNEL_INFO_GET_ATTRIBUTE_FLOAT, info, name, factor));
  if (k.format < 0 || k.format >= FORMAT_COUNT) return failed("unknown format of a matrix");
  if (k.columns < 1 || k.numbers < 1 || k.columns >= MAX_SIZE || k.numbers >= MAX_SIZE)
    return failed("a matrix has a size out of range");
  k.padded = round_up(k.numbers, has_supers(FORMATS[k.format].scales) ? SUPER : BLOCK);
  // Here a session with a wrong matrix is refused; each pass checks all inputs again.
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

// One or several products with matrices of one size, each in `parts` parts; a row is
// quantized in `row_parts` parts.
struct Job {
  const Product* products;
  int64_t format, groups, parts, row_parts = 1;
};

void quantize_part(void* data, size_t index) {
  const Job& job = *(Job*)data;
  const int64_t part = int64_t(index) % job.row_parts,
                blocks = job.products->padded / BLOCK;
  isa->quantize[job.format](*job.products, int64_t(index) / job.row_parts,
                            blocks * part / job.row_parts,
                            blocks * (part + 1) / job.row_parts);
}

void quantize_rows(void* data, size_t product) {
  const Job& job = *(Job*)data;
  const Product& p = job.products[product];
  for (int64_t row = 0; row < p.rows; row++)
    isa->quantize[job.format](p, row, 0, p.padded / BLOCK);
}

void multiply_part(void* data, size_t index) {
  const Job& job = *(Job*)data;
  const int64_t part = int64_t(index) % job.parts;
  const int64_t from = job.groups * part / job.parts,
                to = job.groups * (part + 1) / job.parts;
  isa->multiply[job.format](job.products[int64_t(index) / job.parts], from, to);
}

OrtStatus* multiply_packed(void* data, OrtKernelContext* context) {
  const Kernel& k = *(Kernel*)data;
  Tensor x, bias;
  Product p{};
  Job job{};
  int64_t one = 0;
  TRY(read_input(context, ort::FLOAT, &x));
  TRY(read_input(context, ort::FLOAT, &bias, 3));
  TRY(k.read_matrix(context, &p.integers, &p.scales, &one));
  const int64_t width = k.is_gated ? 2 * k.numbers : k.numbers;
  if (x.rank < 1 || x.dims[x.rank - 1] != width)
    return failed("the rows have another width than the matrix");
  if (bias.given && !bias.has_dims({k.columns}))
    return failed("a bias has another size than the matrix has columns");
  p.columns = k.columns, p.numbers = k.numbers, p.padded = k.padded;
  p.x = (const float*)x.data, p.rows = x.size / width, p.bias = (const float*)bias.data;
  p.is_gated = k.is_gated, p.linear = k.linear, p.cubic = k.cubic;
  x.dims[x.rank - 1] = k.columns;
  TRY(make_output(context, x, &p.y));
  if (p.rows == 0) return nullptr;

  const Memory memory(p.rows * (k.padded / BLOCK) * int64_t(sizeof(RowBlock)));
  p.read = (RowBlock*)memory.data;
  if (p.read == nullptr) return failed("out of memory");
  job.products = &p, job.format = k.format, job.groups = k.groups();
  const int64_t size = k.columns * k.padded;
  job.parts = size < SMALL_BYTES ? 1 : std::min(PARTS, job.groups);
  if (p.is_gated && p.rows < FEW_ROWS) job.row_parts = ROW_PARTS;
  if (job.parts == 1 || p.rows * job.row_parts < FEW_ROWS)
    quantize_rows(&job, 0);
  else
    TRY(for_each(context, quantize_part, p.rows * job.row_parts, &job));
  if (job.parts == 1) return multiply_part(&job, 0), nullptr;
  return for_each(context, multiply_part, job.parts, &job);
}

// The rows in the order of their experts: where each expert's rows begin, and the rows.
OrtStatus* order_rows(const Tensor& ids, int64_t experts, int64_t* begin, int64_t* rows) {
  const auto* id = (const int64_t*)ids.data;
  for (int64_t i = 0; i < ids.size; i++) {
    if (id[i] < 0 || id[i] >= experts)
      return failed("there is no expert %lld among %lld", (long long)id[i],
                    (long long)experts);
    begin[id[i] + 1]++;
  }
  for (int64_t e = 0; e < experts; e++) begin[e + 1] += begin[e];
  // Each expert's beginning moves to its end, which is the beginning of the next.
  for (int64_t i = 0; i < ids.size; i++) rows[begin[id[i]]++] = i;
  for (int64_t e = experts; e > 0; e--) begin[e] = begin[e - 1];
  begin[0] = 0;
  return nullptr;
}

OrtStatus* multiply_experts(void* data, OrtKernelContext* context) {
  const Kernel& k = *(Kernel*)data;
  Tensor x, ids;
  Product all{};
  int64_t experts = 0;
  TRY(read_input(context, ort::FLOAT, &x));
  TRY(k.read_matrix(context, &all.integers, &all.scales, &experts));
  TRY(read_input(context, ort::INT64, &ids, 3));
  if (ids.rank != 1 || !x.has_dims({ids.size, k.numbers}))
    return failed("the rows have another shape than the experts and their ids");
  all.columns = k.columns, all.numbers = k.numbers, all.padded = k.padded;
  all.x = (const float*)x.data;
  x.dims[1] = k.columns;
  TRY(make_output(context, x, &all.y));
  if (ids.size == 0) return nullptr;

  const int64_t blocks = k.padded / BLOCK, most = std::min(ids.size, experts);
  const Memory read(ids.size * blocks * int64_t(sizeof(RowBlock))),
      numbers((experts + 1 + ids.size) * int64_t(sizeof(int64_t))),
      products(most * int64_t(sizeof(Product)));
  if (read.data == nullptr || numbers.data == nullptr || products.data == nullptr)
    return failed("out of memory");
  auto *begin = (int64_t*)numbers.data, *rows = begin + experts + 1;
  std::fill(begin, rows, 0);
  TRY(order_rows(ids, experts, begin, rows));
  auto* product = (Product*)products.data;
  int64_t count = 0;
  for (int64_t e = 0; e < experts; e++) {
    if (begin[e] == begin[e + 1]) continue;
    Product& p = product[count++] = all;
    p.rows = begin[e + 1] - begin[e], p.places = rows + begin[e];
    p.integers += e * k.bytes(1), p.scales += e * k.bytes(2);
    p.read = (RowBlock*)read.data + begin[e] * blocks;
  }
  Job job{product, k.format, k.groups(), 1};
  if (k.columns * k.padded * count >= SMALL_BYTES)
    job.parts = std::min((PARTS + count - 1) / count, job.groups);
  TRY(for_each(context, quantize_rows, count, &job));
  return for_each(context, multiply_part, count * job.parts, &job);
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
    const int q = number_at(w, f.bits, t, place);
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
  int64_t one = 0;
  TRY(read_input(context, ort::INT64, &ids));
  TRY(k.read_matrix(context, &integers, &scales, &one));
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

// --- registration ---------------------------------------------------------------------

using Create = OrtStatus*(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void**);
using Compute = OrtStatus*(void*, OrtKernelContext*);

constexpr int PRODUCT_TYPES[] = {ort::FLOAT, ort::UINT8, ort::UINT8, ort::FLOAT};
constexpr int GATHER_TYPES[] = {ort::INT64, ort::UINT8, ort::UINT8};
constexpr int EXPERTS_TYPES[] = {ort::FLOAT, ort::UINT8, ort::UINT8, ort::INT64};
constexpr int OPTIONAL = 1;

// `LEFT_OUT` has a bit for each input that can be left out.
template <Create* CREATE, Compute* COMPUTE, int OUTPUTS, const auto& TYPES,
          unsigned LEFT_OUT = 0>
OrtCustomOp make_operator(const char* (*name)(const OrtCustomOp*)) {
  OrtCustomOp op{};
  op.version = ort::VERSION;
  op.GetName = name;
  op.GetExecutionProviderType = [](auto) { return "CPUExecutionProvider"; };
  op.GetInputTypeCount = [](auto) { return std::size(TYPES); };
  op.GetInputType = [](auto, size_t i) { return TYPES[i]; };
  op.GetOutputTypeCount = [](auto) { return size_t(OUTPUTS); };
  op.GetOutputType = [](auto, size_t) { return int(ort::FLOAT); };
  op.KernelDestroy = [](void* kernel) { std::free(kernel); };
  op.GetInputCharacteristic = [](auto, size_t i) {
    return LEFT_OUT >> i & 1 ? OPTIONAL : 0;
  };
  op.GetOutputCharacteristic = [](auto, size_t i) { return i == 0 ? 0 : OPTIONAL; };
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
  static const OrtCustomOp multiply =
      make_operator<create<false>, multiply_packed, 1, PRODUCT_TYPES, 1 << 3>(
          [](auto) { return "MatMulPacked"; });
  static const OrtCustomOp gated =
      make_operator<create<false, true>, multiply_packed, 1, PRODUCT_TYPES, 1 << 3>(
          [](auto) { return "MatMulGated"; });
  static const OrtCustomOp gather =
      make_operator<create<false>, gather_packed, 1, GATHER_TYPES>(
          [](auto) { return "GatherPacked"; });
  static const OrtCustomOp experts =
      make_operator<create<true>, multiply_experts, 1, EXPERTS_TYPES>(
          [](auto) { return "MatMulExperts"; });
  static const OrtCustomOp attention =
      make_operator<create_attention, attend_rows, 3, ATTENTION_TYPES, 0xf86>(
          [](auto) { return "GroupQueryAttention"; });
  static const OrtCustomOp recurrence =
      make_operator<create_recurrent, run_linear_attention, 3, RECURRENCE_TYPES, 1 << 7>(
          [](auto) { return "LinearAttention"; });
  static const OrtCustomOp convolution =
      make_operator<create_recurrent, run_convolution, 2, CONVOLUTION_TYPES, 1 << 4>(
          [](auto) { return "CausalConvolution"; });
  OrtCustomOpDomain* domain = nullptr;
  TRY(ort::call(ort::CREATE_CUSTOM_OP_DOMAIN, "jetdraft", &domain));
  for (const OrtCustomOp* op : {&multiply, &gated, &gather, &experts, &attention,
                                &recurrence, &convolution})
    TRY(ort::call(ort::CUSTOM_OP_DOMAIN_ADD, domain, op));
  return ort::call(ort::ADD_CUSTOM_OP_DOMAIN, options, domain);
}

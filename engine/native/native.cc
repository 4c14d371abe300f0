// Attention, and linear maps of few rows, on CPU, as custom calls of XLA programs: engine/native/__init__.py says what they take and
// return.
//
// XLA cannot multiply by pages where they lie: it copies the pages of all rows into one buffer first, three times the memory
// traffic of reading them. Attention here reads pages in place, and in prefill skips what causality hides. It walks over the stored
// tokens in blocks with the online softmax of FlashAttention (arXiv:2205.14135), in float32.
//
// Linear maps of few rows read the weight once, as it is stored, int8 included, which XLA would convert as a whole first.
//
// Work is shared with the threads of XLA's own pool. Instruction sets are chosen when the library is loaded.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

struct BFloat16 {
  uint16_t bits;
};

// --- instruction sets ---------------------------------------------------------------------------------------------------------

namespace baseline {
#define LANES 4
#define ROWS 4
#define COLUMNS 2
#define OUTPUTS 3
#include "kernels.inc"
#undef LANES
#undef ROWS
#undef COLUMNS
#undef OUTPUTS
}  // namespace baseline

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
#define LANES 8
#define ROWS 6
#define COLUMNS 2
#define OUTPUTS 3
#include "kernels.inc"
#undef LANES
#undef ROWS
#undef COLUMNS
#undef OUTPUTS
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#endif
namespace avx512 {
#define LANES 16
#define ROWS 6
#define COLUMNS 4
#define OUTPUTS 6
#include "kernels.inc"
#undef LANES
#undef ROWS
#undef COLUMNS
#undef OUTPUTS
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // x86-64

namespace {

constexpr int64_t kVector = 16;  // lanes of the widest vector; head_dim is a multiple

struct Kernels {
  decltype(&baseline::multiply) multiply;
  decltype(&baseline::scale) scale;
  decltype(&baseline::bound) bound;
  decltype(&baseline::soften) soften;
  decltype(&baseline::score<float>) score_float32;
  decltype(&baseline::score<BFloat16>) score_bfloat16;
  decltype(&baseline::score<int8_t>) score_int8;
  decltype(&baseline::weigh<float>) weigh_float32;
  decltype(&baseline::weigh<BFloat16>) weigh_bfloat16;
  decltype(&baseline::weigh<int8_t>) weigh_int8;
  decltype(&baseline::apply<float>) apply_float32;
  decltype(&baseline::apply<BFloat16>) apply_bfloat16;
  decltype(&baseline::apply<int8_t>) apply_int8;
};

#define KERNELS(set)                                                                                              \
  Kernels {                                                                                                       \
    set::multiply, set::scale, set::bound, set::soften, set::score<float>, set::score<BFloat16>, set::score<int8_t>, \
        set::weigh<float>, set::weigh<BFloat16>, set::weigh<int8_t>, set::apply<float>, set::apply<BFloat16>,      \
        set::apply<int8_t>                                                                                         \
  }

// The kernels of the largest instruction set that this machine has, of at most so many lanes.
Kernels Choose([[maybe_unused]] int lanes) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (lanes >= 16 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return KERNELS(avx512);
  if (lanes >= 8 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return KERNELS(avx2);
#endif
  return KERNELS(baseline);
}

Kernels kernels = Choose(kVector);

auto Score(const float*) { return kernels.score_float32; }
auto Score(const BFloat16*) { return kernels.score_bfloat16; }
auto Score(const int8_t*) { return kernels.score_int8; }
auto Weigh(const float*) { return kernels.weigh_float32; }
auto Weigh(const BFloat16*) { return kernels.weigh_bfloat16; }
auto Weigh(const int8_t*) { return kernels.weigh_int8; }
auto Apply(const float*) { return kernels.apply_float32; }
auto Apply(const BFloat16*) { return kernels.apply_bfloat16; }
auto Apply(const int8_t*) { return kernels.apply_int8; }

float Widen(int8_t x) { return x; }
float Widen(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// --- work ---------------------------------------------------------------------------------------------------------------------

constexpr int64_t kBlock = 64;             // tokens whose scores exist at once
constexpr int64_t kChunk = 512;            // tokens of one row that one thread takes in decode
constexpr int64_t kQueries = 256;          // queries of one key/value head that one thread takes in prefill
constexpr int64_t kWorthSharing = 1 << 15;  // numbers read: less is done before another thread wakes up
constexpr int64_t kParts = 8;              // of a linear map for each thread, so that one that comes late holds up little
constexpr int64_t kTiles = 6;              // a part's outputs are a multiple
constexpr float kNothing = -1e30f;         // a sink of this score is none
constexpr float kMasked = -std::numeric_limits<float>::infinity();

// Calls work(item) for each of [0, items), here and on the threads of a pool, and returns when all are done.
template <typename Work>
void ForEach(ffi::ThreadPool& pool, int64_t items, bool share, const Work& work) {
  struct Shared {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };
  const auto shared = std::make_shared<Shared>();
  // One that starts late finds nothing left and touches nothing else.
  auto run = [shared, items, &work] {
    for (int64_t item; (item = shared->next.fetch_add(1)) < items;) {
      work(item);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  const int64_t helpers = share ? std::min(pool.num_threads(), items) - 1 : 0;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(decltype(run)(run));
  run();
  while (shared->done.load(std::memory_order_acquire) < items) std::this_thread::yield();
}

// Keys or values as they are stored: data [layers, heads, places, head_dim], of one token at each place; scales likewise without
// head_dim, or null.
template <typename T>
struct Pool {
  T* data;
  float* scales;
  int64_t heads, places, head_dim;

  int64_t At(int64_t layer, int64_t head, int64_t place) const { return (layer * heads + head) * places + place; }
  T* Data(int64_t at) const { return data + at * head_dim; }
  float* Scales(int64_t at) const { return scales ? scales + at : nullptr; }
};

struct Scoring {
  float scale, softcap;  // of no softcap: 0
  int64_t window;
};

struct Softmax {
  float maximum, total;
};

Softmax Begin(float sink) { return {sink, sink > kNothing ? 1.0f : 0.0f}; }

// --- decode -------------------------------------------------------------------------------------------------------------------

template <typename T>
struct Decode {
  int64_t rows, heads, group, head_dim, page_size, width, layer;
  Scoring scoring;
  const float* q;           // [rows, heads, group, head_dim]
  const int32_t* table;     // [rows, width]
  const int32_t* lengths;   // [rows]
  const int32_t* pages;     // [rows]: where the row's new token goes
  const int32_t* offsets;   // [rows]
  const float* sinks;       // [heads, group]
  Pool<const T> new_k, new_v;  // of one layer: [rows, heads, head_dim], places are heads and heads are rows
  Pool<T> k, v;             // places are pages * page_size

  // Stores the new token of a row's head.
  void Store(int64_t row, int64_t head) const {
    const int64_t from = new_k.At(0, row, head);
    const int64_t to = k.At(layer, head, pages[row] * page_size + offsets[row]);
    std::memcpy(k.Data(to), new_k.Data(from), head_dim * sizeof(T));
    std::memcpy(v.Data(to), new_v.Data(from), head_dim * sizeof(T));
    if (k.scales) {
      *k.Scales(to) = *new_k.Scales(from);
      *v.Scales(to) = *new_v.Scales(from);
    }
  }

  // Attends to the tokens [first, last) of a row: softmax [group], out [group, head_dim].
  void Attend(int64_t row, int64_t head, int64_t first, int64_t last, Softmax* softmax, float* out) const {
    std::vector<float> queries(q + (row * heads + head) * group * head_dim, q + (row * heads + head + 1) * group * head_dim);
    kernels.scale(queries.data(), group * head_dim, scoring.scale);
    std::vector<float> scores(group * kBlock);
    for (int64_t block = first; block < last; block += kBlock) {
      const int64_t tokens = std::min(kBlock, last - block);
      const int64_t padded = (tokens + kVector - 1) / kVector * kVector;
      const auto each_page = [&](const auto& visit) {
        for (int64_t t = 0, count; t < tokens; t += count) {
          const int64_t offset = (block + t) % page_size;
          count = std::min(page_size - offset, tokens - t);
          visit(t, table[row * width + (block + t) / page_size] * page_size + offset, count);
        }
      };
      each_page([&](int64_t t, int64_t place, int64_t count) {
        const int64_t at = k.At(layer, head, place);
        for (int64_t g = 0; g < group; ++g)
          Score(k.data)(&queries[g * head_dim], k.Data(at), k.Scales(at), &scores[g * kBlock + t], count, head_dim);
      });
      for (int64_t g = 0; g < group; ++g) {
        float* of_query = &scores[g * kBlock];
        std::fill(of_query + tokens, of_query + padded, 0.0f);
        if (scoring.softcap > 0) kernels.bound(of_query, padded, scoring.softcap);
        std::fill(of_query + tokens, of_query + padded, kMasked);
        const float rescale = kernels.soften(of_query, padded, &softmax[g].maximum, &softmax[g].total);
        if (rescale != 1.0f) kernels.scale(out + g * head_dim, head_dim, rescale);
      }
      each_page([&](int64_t t, int64_t place, int64_t count) {
        const int64_t at = v.At(layer, head, place);
        for (int64_t g = 0; g < group; ++g)
          Weigh(v.data)(&scores[g * kBlock + t], v.Data(at), v.Scales(at), out + g * head_dim, count, head_dim);
      });
    }
  }

  void Run(ffi::ThreadPool& pool, float* out) const {
    const int64_t longest = *std::max_element(lengths, lengths + rows);
    const int64_t chunks = std::max<int64_t>(1, (longest + kChunk - 1) / kChunk);
    std::vector<Softmax> softmax(rows * heads * chunks * group);
    std::vector<float> partial(softmax.size() * head_dim);
    int64_t live = 0;
    for (int64_t row = 0; row < rows; ++row) live += lengths[row];

    ForEach(pool, rows * heads * chunks, live * heads * head_dim > kWorthSharing, [&](int64_t item) {
      const int64_t chunk = item % chunks, head = item / chunks % heads, row = item / chunks / heads;
      const int64_t length = lengths[row], seen = std::max<int64_t>(0, length - scoring.window);
      const int64_t first = std::max(seen, chunk * kChunk), last = std::min(length, (chunk + 1) * kChunk);
      for (int64_t g = 0; g < group; ++g) softmax[item * group + g] = Begin(chunk ? kNothing : sinks[head * group + g]);
      if (first >= last) return;
      if (last == length) Store(row, head);
      Attend(row, head, first, last, &softmax[item * group], &partial[item * group * head_dim]);
    });

    for (int64_t query = 0; query < rows * heads * group; ++query) {
      const int64_t first = query / group * chunks * group + query % group;  // of its chunks, `group` apart
      float maximum = kNothing, total = 0;
      for (int64_t c = 0; c < chunks; ++c) maximum = std::max(maximum, softmax[first + c * group].maximum);
      float* result = out + query * head_dim;
      std::fill(result, result + head_dim, 0.0f);
      for (int64_t c = 0; c < chunks; ++c) {
        const int64_t part = first + c * group;
        const float weight = std::exp(softmax[part].maximum - maximum);
        total += softmax[part].total * weight;
        for (int64_t d = 0; d < head_dim; ++d) result[d] += partial[part * head_dim + d] * weight;
      }
      kernels.scale(result, head_dim, 1.0f / std::max(total, 1e-30f));
    }
  }
};

// --- prefill ------------------------------------------------------------------------------------------------------------------

template <typename T>
struct Prefill {
  int64_t tokens, heads, group, head_dim, layer, start, length;
  Scoring scoring;
  const float* q;      // [tokens, heads, group, head_dim]
  const float* sinks;  // [heads, group]
  Pool<const T> k, v;  // places are positions

  // The queries of one head at tokens [first, last).
  void Attend(int64_t head, int64_t first, int64_t last, float* out) const {
    const int64_t rows = (last - first) * group;  // a token's queries are consecutive
    std::vector<float> queries(rows * head_dim), weighted(rows * head_dim), scores(rows * kBlock);
    std::vector<float> keys(head_dim * kBlock), buffer(std::is_same_v<T, float> ? 0 : kBlock * head_dim);
    std::vector<Softmax> softmax(rows);
    for (int64_t row = 0; row < rows; ++row) {
      const float* from = q + (((first + row / group) * heads + head) * group + row % group) * head_dim;
      for (int64_t d = 0; d < head_dim; ++d) queries[row * head_dim + d] = from[d] * scoring.scale;
      softmax[row] = Begin(sinks[head * group + row % group]);
    }
    const int64_t furthest = std::max<int64_t>(0, start + first + 1 - scoring.window);
    const int64_t end = std::min(length, start + last);
    for (int64_t block = furthest / kBlock * kBlock; block < end; block += kBlock) {
      const int64_t count = std::min(kBlock, end - block), at = k.At(layer, head, block);
      if (count < kBlock) std::fill(keys.begin(), keys.end(), 0.0f);
      const float* of_keys = AsFloat(k.Data(at), k.Scales(at), count, buffer.data());
      for (int64_t d = 0; d < head_dim; ++d)
        for (int64_t t = 0; t < count; ++t) keys[d * kBlock + t] = of_keys[t * head_dim + d];
      const float* of_values = AsFloat(v.Data(at), v.Scales(at), count, buffer.data());
      const int64_t before = std::max<int64_t>(0, block - start - first) * group;  // rows that see nothing of this block
      kernels.multiply(&queries[before * head_dim], head_dim, keys.data(), kBlock, &scores[before * kBlock], kBlock, rows - before,
                       kBlock, head_dim, false);
      for (int64_t row = before; row < rows; ++row) {
        float* of_row = &scores[row * kBlock];
        if (scoring.softcap > 0) kernels.bound(of_row, kBlock, scoring.softcap);
        const int64_t position = start + first + row / group;
        const int64_t hidden = std::clamp<int64_t>(position + 1 - scoring.window - block, 0, kBlock);
        std::fill(of_row, of_row + hidden, kMasked);
        std::fill(of_row + std::clamp<int64_t>(position + 1 - block, 0, count), of_row + kBlock, kMasked);
        const float rescale = kernels.soften(of_row, kBlock, &softmax[row].maximum, &softmax[row].total);
        if (rescale != 1.0f) kernels.scale(&weighted[row * head_dim], head_dim, rescale);
      }
      kernels.multiply(&scores[before * kBlock], kBlock, of_values, head_dim, &weighted[before * head_dim], head_dim,
                       rows - before, head_dim, count, true);
    }
    for (int64_t row = 0; row < rows; ++row) {
      float* to = out + (((first + row / group) * heads + head) * group + row % group) * head_dim;
      const float inverse = 1.0f / std::max(softmax[row].total, 1e-30f);
      for (int64_t d = 0; d < head_dim; ++d) to[d] = weighted[row * head_dim + d] * inverse;
    }
  }

  const float* AsFloat(const T* stored, const float* scales, int64_t count, float* buffer) const {
    if constexpr (std::is_same_v<T, float>) {
      return stored;
    } else {
      for (int64_t t = 0; t < count; ++t)
        for (int64_t d = 0; d < head_dim; ++d) buffer[t * head_dim + d] = Widen(stored[t * head_dim + d]) * (scales ? scales[t] : 1.0f);
      return buffer;
    }
  }

  void Run(ffi::ThreadPool& pool, float* out) const {
    const int64_t size = std::max<int64_t>(1, kQueries / group), blocks = (tokens + size - 1) / size;
    ForEach(pool, blocks * heads, tokens * length * heads * group > kWorthSharing, [&](int64_t item) {
      const int64_t first = (blocks - 1 - item / heads) * size;  // the longest first
      Attend(item % heads, first, std::min(tokens, first + size), out);
    });
  }
};

// --- linear maps --------------------------------------------------------------------------------------------------------------

template <typename T>
struct Linear {
  int64_t rows, outputs, depth;
  const float* x;       // [rows, depth]
  const T* weight;      // [outputs, depth]
  const float* scales;  // [outputs], or null

  void Run(ffi::ThreadPool& pool, float* out) const {
    const int64_t parts = std::clamp<int64_t>(outputs * depth / kWorthSharing, 1, kParts * pool.num_threads());
    const int64_t size = (outputs / parts + kTiles) / kTiles * kTiles;
    ForEach(pool, (outputs + size - 1) / size, parts > 1, [&](int64_t item) {
      Apply(weight)(x, weight, scales, out, item * size, std::min(outputs, (item + 1) * size), outputs, rows, depth);
    });
  }
};

// --- custom calls -------------------------------------------------------------------------------------------------------------

ffi::Error Invalid(const char* what) { return ffi::Error::InvalidArgument(what); }

template <typename T>
Pool<T> MakePool(const ffi::AnyBuffer& data, float* scales, int64_t places) {
  const auto shape = data.dimensions();
  return {static_cast<T*>(data.untyped_data()), scales, shape[1], places, shape.back()};
}

// Calls with a null pointer of the type that a buffer holds.
template <typename Call>
ffi::Error Dispatch(const ffi::AnyBuffer& stored, const Call& call) {
  switch (stored.element_type()) {
    case ffi::DataType::F32:
      return call(static_cast<float*>(nullptr));
    case ffi::DataType::BF16:
      return call(static_cast<BFloat16*>(nullptr));
    case ffi::DataType::S8:
      return call(static_cast<int8_t*>(nullptr));
    default:
      return Invalid("what is stored must be float32, bfloat16 or int8");
  }
}

// What is stored as one array, or as two with scales.
struct Stored {
  ffi::AnyBuffer data;
  float* scales;  // or null
};

// ``count`` of them, either all with scales or none.
ffi::Error Unpack(ffi::RemainingArgs arguments, size_t count, std::vector<Stored>& stored) {
  const size_t each = arguments.size() / count;
  if (each * count != arguments.size() || each < 1 || each > 2) return Invalid("stored arrays come alone, or each with its scales");
  for (size_t i = 0; i < arguments.size(); i += each) {
    const auto data = arguments.get<ffi::AnyBuffer>(i), scales = arguments.get<ffi::AnyBuffer>(i + each - 1);
    if (data.has_error()) return data.error();
    if (scales.has_error()) return scales.error();
    stored.push_back({*data, each == 2 ? static_cast<float*>(scales->untyped_data()) : nullptr});
  }
  return ffi::Error::Success();
}

ffi::Error DecodeCall(ffi::ThreadPool pool, float scale, float softcap, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::S32> layer,
                      ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::S32> pages,
                      ffi::Buffer<ffi::S32> offsets, ffi::Buffer<ffi::S32> window, ffi::Buffer<ffi::F32> sinks,
                      ffi::RemainingArgs stored, ffi::Result<ffi::Buffer<ffi::F32>> out, ffi::RemainingRets) {
  // new k, new v, k, v; or each with scales: new k, scales, new v, ...
  std::vector<Stored> arrays;
  if (const auto error = Unpack(stored, 4, arrays); error.failure()) return error;
  const auto shape = q.dimensions(), of_pool = arrays[2].data.dimensions();
  if (shape[3] % kVector) return Invalid("head_dim must be a multiple of 16");
  return Dispatch(arrays[2].data, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    Decode<T>{shape[0],
              shape[1],
              shape[2],
              shape[3],
              of_pool[3],
              table.dimensions()[1],
              layer.typed_data()[0],
              {scale, softcap, window.typed_data()[0]},
              q.typed_data(),
              table.typed_data(),
              lengths.typed_data(),
              pages.typed_data(),
              offsets.typed_data(),
              sinks.typed_data(),
              {static_cast<const T*>(arrays[0].data.untyped_data()), arrays[0].scales, shape[0], shape[1], shape[3]},
              {static_cast<const T*>(arrays[1].data.untyped_data()), arrays[1].scales, shape[0], shape[1], shape[3]},
              MakePool<T>(arrays[2].data, arrays[2].scales, of_pool[2] * of_pool[3]),
              MakePool<T>(arrays[3].data, arrays[3].scales, of_pool[2] * of_pool[3])}
        .Run(pool, out->typed_data());
    return ffi::Error::Success();
  });
}

ffi::Error PrefillCall(ffi::ThreadPool pool, float scale, float softcap, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::S32> layer,
                       ffi::Buffer<ffi::S32> start, ffi::Buffer<ffi::S32> length, ffi::Buffer<ffi::S32> window,
                       ffi::Buffer<ffi::F32> sinks, ffi::RemainingArgs stored, ffi::Result<ffi::Buffer<ffi::F32>> out) {
  // k, v; or each with scales
  std::vector<Stored> arrays;
  if (const auto error = Unpack(stored, 2, arrays); error.failure()) return error;
  const auto shape = q.dimensions();
  if (shape[3] % kVector) return Invalid("head_dim must be a multiple of 16");
  return Dispatch(arrays[0].data, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const int64_t capacity = arrays[0].data.dimensions()[2];
    Prefill<T>{shape[0],
               shape[1],
               shape[2],
               shape[3],
               layer.typed_data()[0],
               start.typed_data()[0],
               length.typed_data()[0],
               {scale, softcap, window.typed_data()[0]},
               q.typed_data(),
               sinks.typed_data(),
               MakePool<const T>(arrays[0].data, arrays[0].scales, capacity),
               MakePool<const T>(arrays[1].data, arrays[1].scales, capacity)}
        .Run(pool, out->typed_data());
    return ffi::Error::Success();
  });
}

ffi::Error LinearCall(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs stored,
                      ffi::Result<ffi::Buffer<ffi::F32>> out) {
  std::vector<Stored> arrays;
  if (const auto error = Unpack(stored, 1, arrays); error.failure()) return error;
  const ffi::AnyBuffer weight = arrays[0].data;
  const auto shape = weight.dimensions();
  if (shape[1] % kVector) return Invalid("inputs must be a multiple of 16");
  return Dispatch(weight, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    Linear<T>{x.dimensions()[0], shape[0], shape[1], x.typed_data(), static_cast<const T*>(weight.untyped_data()), arrays[0].scales}.Run(
        pool, out->typed_data());
    return ffi::Error::Success();
  });
}

// What decode and prefill begin with: scale, softcap, q, layer, and where the tokens are.
auto Attention() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Attr<float>("scale")
      .Attr<float>("softcap")
      .Arg<ffi::Buffer<ffi::F32>>()
      .Arg<ffi::Buffer<ffi::S32>>()
      .Arg<ffi::Buffer<ffi::S32>>()
      .Arg<ffi::Buffer<ffi::S32>>();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(preheat_decode, DecodeCall,
                              Attention()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(preheat_prefill, PrefillCall,
                              Attention()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(preheat_linear, LinearCall,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>());

// For tests: from now on vectors have at most so many lanes. Not while anything runs.
extern "C" void preheat_limit_lanes(int lanes) { kernels = Choose(lanes); }

// The step of seloptim/_rule.py over many parameters in one call: pull and update in one pass over a parameter, push in
// a second one, since it needs the factors that all rows of the first have a share in.
//
// Transcribed from _rule.py, which is the reference; the symbols are those of functional.py. What differs is rounding.
// With a = |raw|, s = sign(raw), X = expm1(beta*m*a), N = exp(-n) and scales that are row[i]*col[j] the sums factorise:
//
//     U = g*s*X*N              grad e = sum U / beta,   grad n = -sum U * e / beta
//     V = g*(a or raw)         grad l = sum V / beta
//     W = g*raw*(1 + X)*N      grad m = sum W * e,      grad raw = g*e*m*(1 + X)*N + g*(s or 1)*l/beta
//
// each sum being weighted with the other factor, and whatever depends on the row (or column) alone taken out of it.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__AVX__)
#include <immintrin.h>
#endif

// Without it the compiler calls these, and each call spills every vector register.
#define INLINE inline __attribute__((always_inline))

namespace {

// ---------------------------------------------------------------------------------------------------------------- vectors

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif

template <typename T>
struct Simd;

template <>
struct Simd<float> {
  typedef float V __attribute__((vector_size(kBytes)));
  typedef uint32_t U __attribute__((vector_size(kBytes)));
  typedef float V4 __attribute__((vector_size(16)));
  typedef uint32_t U4 __attribute__((vector_size(16)));
  typedef uint32_t Bits;
  static constexpr int mantissa = 23, bias = 127;
  static constexpr float round = 12582912.0f;        // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float high = 128.4f, low = -124.4f;  // beyond: infinite, or 0 beside 1
  // (2^f - 1) / f on [-1/2, 1/2], interpolated at the Chebyshev nodes: 1.3e-8
  static constexpr float poly[] = {0.69314718802622878f,   0.24022650760568127f,   0.055503571142190778f,
                                   0.0096180825572778515f, 0.0013390863364671234f, 0.00015453162945120690f};
};

template <>
struct Simd<double> {
  typedef double V __attribute__((vector_size(kBytes)));
  typedef uint64_t U __attribute__((vector_size(kBytes)));
  typedef double V4 __attribute__((vector_size(32)));
  typedef uint64_t U4 __attribute__((vector_size(32)));
  typedef uint64_t Bits;
  static constexpr int mantissa = 52, bias = 1023;
  static constexpr double round = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double high = 1024.4, low = -1020.4;
  // likewise: 2e-17
  static constexpr double poly[] = {0.69314718055994530942,   0.2402265069591009822,    0.055504108664821594339,
                                    0.0096181291076068885273, 0.001333355814641693531,  0.00015403530441736050155,
                                    1.5252733829836118394e-5, 1.3215442587921689653e-6, 1.0178062445845773521e-7,
                                    7.0725859692492236999e-9, 4.4549605981865183938e-10};
};

template <typename T>
using Vec = typename Simd<T>::V;
template <typename T>
using Mask = typename Simd<T>::U;
template <typename T>
constexpr int kWidth = kBytes / int(sizeof(T));

template <typename T>
INLINE Vec<T> load(const T* from) {
  Vec<T> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <typename T>
INLINE void store(T* to, Vec<T> v) {
  std::memcpy(to, &v, sizeof v);
}

// The lanes of x and y in turn, from lane `from` of each on; every second lane of x and then of y, from lane `from` on.
template <size_t from, typename V, size_t... I>
INLINE V in_turn(V x, V y, std::index_sequence<I...>) {
  return V{(I % 2 ? y : x)[from + I / 2]...};
}
template <size_t from, typename V, size_t... I>
INLINE V every_second(V x, V y, std::index_sequence<I...>) {
  return V{(I < sizeof...(I) / 2 ? x : y)[from + 2 * I % sizeof...(I)]...};
}

template <typename V>
INLINE V square_root(V v) {
  V r;
  for (size_t i = 0; i < sizeof(V) / sizeof(v[0]); ++i) r[i] = std::sqrt(v[i]);
  return r;
}

template <typename T>
INLINE Mask<T> sign_bit(Vec<T> v) {
  constexpr typename Simd<T>::Bits top = typename Simd<T>::Bits(1) << (8 * sizeof(T) - 1);
  return (Mask<T>)v & top;
}

template <typename T>
INLINE Vec<T> flip(Vec<T> v, Mask<T> sign) {
  return (Vec<T>)((Mask<T>)v ^ sign);
}

// What AVX-512 has instructions for: y in an integer, `nearest`, and the `rest`; half of x*2^t, for an x in units of `kUnit` (half of
// 2^t is in the range of floats where 2^t is not); which lanes are finite, or not zero; sum + x*y where a lane is; a store past the
// caches; and whether x is finite and y not zero in all lanes, to branch on (elsewhere it is denied, since it costs what it saves).
#if defined(__AVX512DQ__)

using Lanes = uint32_t;
constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

INLINE Vec<float> nearest(Vec<float> y) { return (Vec<float>)_mm512_roundscale_ps((__m512)y, kNearest); }
INLINE Vec<double> nearest(Vec<double> y) { return (Vec<double>)_mm512_roundscale_pd((__m512d)y, kNearest); }
INLINE Vec<float> rest(Vec<float> y, Vec<float>) { return (Vec<float>)_mm512_reduce_ps((__m512)y, kNearest); }
INLINE Vec<double> rest(Vec<double> y, Vec<double>) { return (Vec<double>)_mm512_reduce_pd((__m512d)y, kNearest); }
template <typename T>
constexpr T kUnit = 0.5;  // the instruction knows 2^t in its whole range
INLINE Vec<float> half_scale(Vec<float> x, Vec<float> t) { return (Vec<float>)_mm512_scalef_ps((__m512)x, (__m512)t); }
INLINE Vec<double> half_scale(Vec<double> x, Vec<double> t) { return (Vec<double>)_mm512_scalef_pd((__m512d)x, (__m512d)t); }

constexpr int kNotFinite = 0x99;  // NaN of either kind, infinity of either sign
INLINE Lanes finite(Vec<float> v) { return _knot_mask16(_mm512_fpclass_ps_mask((__m512)v, kNotFinite)); }
INLINE Lanes finite(Vec<double> v) { return _knot_mask8(_mm512_fpclass_pd_mask((__m512d)v, kNotFinite)); }
INLINE Lanes not_zero(Vec<float> v) { return _mm512_cmp_ps_mask((__m512)v, __m512{}, _CMP_NEQ_UQ); }
INLINE Lanes not_zero(Vec<double> v) { return _mm512_cmp_pd_mask((__m512d)v, __m512d{}, _CMP_NEQ_UQ); }
INLINE Vec<float> add_where(Lanes lanes, Vec<float> x, Vec<float> y, Vec<float> sum) {
  return (Vec<float>)_mm512_mask3_fmadd_ps((__m512)x, (__m512)y, (__m512)sum, lanes);
}
INLINE Vec<double> add_where(Lanes lanes, Vec<double> x, Vec<double> y, Vec<double> sum) {
  return (Vec<double>)_mm512_mask3_fmadd_pd((__m512d)x, (__m512d)y, (__m512d)sum, lanes);
}
INLINE Vec<float> smaller(Vec<float> x, Vec<float> y) { return (Vec<float>)_mm512_min_ps((__m512)x, (__m512)y); }
INLINE Vec<double> smaller(Vec<double> x, Vec<double> y) { return (Vec<double>)_mm512_min_pd((__m512d)x, (__m512d)y); }
INLINE void stream(float* to, Vec<float> v) { _mm512_stream_ps(to, (__m512)v); }
INLINE void stream(double* to, Vec<double> v) { _mm512_stream_pd(to, (__m512d)v); }
INLINE void end_of_stream() { _mm_sfence(); }
INLINE bool finite_and_not_zero(Vec<float> x, Vec<float> y) {
  return _kortestz_mask16_u8(_mm512_fpclass_ps_mask((__m512)x, kNotFinite),
                             _mm512_cmp_ps_mask((__m512)y, __m512{}, _CMP_EQ_OQ));
}
INLINE bool finite_and_not_zero(Vec<double> x, Vec<double> y) {
  return _kortestz_mask8_u8(_mm512_fpclass_pd_mask((__m512d)x, kNotFinite),
                            _mm512_cmp_pd_mask((__m512d)y, __m512d{}, _CMP_EQ_OQ));
}

#else

// Written so that NaN passes: these instructions return their second operand then.
INLINE Vec<float> clamp(Vec<float> y) {
#if defined(__AVX__) && !defined(__AVX512F__)
  y = (Vec<float>)_mm256_min_ps(_mm256_set1_ps(Simd<float>::high), (__m256)y);
  return (Vec<float>)_mm256_max_ps(_mm256_set1_ps(Simd<float>::low), (__m256)y);
#else
  y = y > Simd<float>::high ? Simd<float>::high - Vec<float>{} : y;
  return y < Simd<float>::low ? Simd<float>::low - Vec<float>{} : y;
#endif
}

INLINE Vec<double> clamp(Vec<double> y) {
  y = y > Simd<double>::high ? Simd<double>::high - Vec<double>{} : y;
  return y < Simd<double>::low ? Simd<double>::low - Vec<double>{} : y;
}

// The integer stands in the last bits of the sum.
INLINE Vec<float> nearest(Vec<float> y) { return clamp(y) + Simd<float>::round; }
INLINE Vec<double> nearest(Vec<double> y) { return clamp(y) + Simd<double>::round; }

template <typename V>
INLINE V rest(V y, V t) {
  return clamp(y) - (t - Simd<std::decay_t<decltype(y[0])>>::round);
}

template <typename T>
constexpr T kUnit = 1;
template <typename V>
INLINE V half_scale(V x, V t) {
  using S = Simd<std::decay_t<decltype(x[0])>>;
  return x * (V)(((typename S::U)t << S::mantissa) + (typename S::Bits(S::bias - 1) << S::mantissa));
}

template <typename V>
INLINE auto finite(V v) {
  return v - v == V{};
}
template <typename V>
INLINE auto not_zero(V v) {
  return v != V{};
}
template <typename Lanes, typename V>
INLINE V add_where(Lanes lanes, V x, V y, V sum) {
  return sum + (lanes ? x * y : V{});
}
template <typename V>
INLINE V smaller(V x, V y) {
  return x < y ? x : y;
}
template <typename T, typename V>
INLINE void stream(T* to, V v) {
  std::memcpy(to, &v, sizeof v);
}
INLINE void end_of_stream() {}
template <typename V>
INLINE bool finite_and_not_zero(V, V) {
  return false;
}

#endif

// P vectors in lockstep: while one waits for the result of an operation another occupies the processor, which cannot look far
// enough ahead to find as much to do.
template <typename V, int P>
struct Pack {
  V v[P];
};
template <typename T, int P>
using Vecs = Pack<Vec<T>, P>;

#define EACH_OF(expression) \
  each<P>([&](size_t i) __attribute__((always_inline)) { return expression; }, std::make_index_sequence<P>{})

template <int P, typename F, size_t... I>
INLINE auto each(const F& f, std::index_sequence<I...>) {
  return Pack<decltype(f(size_t(0))), P>{f(I)...};
}

template <typename V, int P>
INLINE Pack<V, P> operator+(const Pack<V, P>& a, const Pack<V, P>& b) { return EACH_OF(a.v[i] + b.v[i]); }
template <typename V, int P>
INLINE Pack<V, P> operator-(const Pack<V, P>& a, const Pack<V, P>& b) { return EACH_OF(a.v[i] - b.v[i]); }
template <typename V, int P>
INLINE Pack<V, P> operator*(const Pack<V, P>& a, const Pack<V, P>& b) { return EACH_OF(a.v[i] * b.v[i]); }
template <typename V, int P>
INLINE Pack<V, P> operator/(const Pack<V, P>& a, const Pack<V, P>& b) { return EACH_OF(a.v[i] / b.v[i]); }
template <typename V, int P, typename T>
INLINE Pack<V, P> operator+(const Pack<V, P>& a, T b) { return EACH_OF(a.v[i] + b); }
template <typename V, int P, typename T>
INLINE Pack<V, P> operator*(const Pack<V, P>& a, T b) { return EACH_OF(a.v[i] * b); }

// P neighbours in memory.
template <int P, typename T>
INLINE Vecs<T, P> load(const T* from) {
  return EACH_OF(load(from + i * kWidth<T>));
}
template <typename T, int P>
INLINE void store(T* to, const Vecs<T, P>& p) {
#pragma GCC unroll 8
  for (int i = 0; i < P; ++i) store(to + i * kWidth<T>, p.v[i]);
}

// 2^y = 2^whole * (1 + part), part in kUnit and accurate near zero.
template <typename T, int P>
INLINE void exp2_parts(const Vecs<T, P>& y, Vecs<T, P>& whole, Vecs<T, P>& part) {
  using S = Simd<T>;
  constexpr int terms = sizeof(S::poly) / sizeof(T);
  whole = EACH_OF(nearest(y.v[i]));
  const auto f = EACH_OF(rest(y.v[i], whole.v[i]));
  auto q = f * (S::poly[terms - 1] * kUnit<T>) + S::poly[terms - 2] * kUnit<T>;
#pragma GCC unroll 16
  for (int k = terms - 3; k >= 0; --k) q = q * f + S::poly[k] * kUnit<T>;
  part = q * f;
}

// Half of 2^y - 1.
template <typename T, int P>
INLINE Vecs<T, P> half_expm1_base2(const Vecs<T, P>& y) {
  Vecs<T, P> whole, part;
  exp2_parts<T, P>(y, whole, part);
  const Vec<T> unit = kUnit<T> - Vec<T>{};
  return EACH_OF(half_scale(part.v[i], whole.v[i])) + EACH_OF(half_scale(unit, whole.v[i]) - T(0.5));
}

template <typename T, int P>
INLINE Vecs<T, P> exp_base2(const Vecs<T, P>& y) {
  Vecs<T, P> whole, part;
  exp2_parts<T, P>(y, whole, part);
  const auto half = EACH_OF(half_scale(part.v[i] + kUnit<T>, whole.v[i]));
  return half + half;
}

constexpr int kPack = 2, kPush = 4;  // vectors in lockstep, in the first and in the second pass
constexpr int kStrip = 16;           // vectors of a row that are pulled and updated before their map, where that follows at once
static_assert(kStrip % kPack == 0);

constexpr double kLog2E = 1.4426950408889634074;

// --------------------------------------------------------------------------------------------------------- what is stepped

enum Kind { E, L, M, N, kKinds };

// A vector of each kind, and the four in which the kinds of a column stand side by side, as factors are kept.
template <typename T>
INLINE void to_kinds(const Vec<T>* factors, Vec<T>* kinds) {
  constexpr std::make_index_sequence<kWidth<T>> lanes;
  const Vec<T> em[2] = {every_second<0>(factors[0], factors[1], lanes), every_second<0>(factors[2], factors[3], lanes)};
  const Vec<T> ln[2] = {every_second<1>(factors[0], factors[1], lanes), every_second<1>(factors[2], factors[3], lanes)};
  kinds[E] = every_second<0>(em[0], em[1], lanes), kinds[M] = every_second<1>(em[0], em[1], lanes);
  kinds[L] = every_second<0>(ln[0], ln[1], lanes), kinds[N] = every_second<1>(ln[0], ln[1], lanes);
}

template <typename T>
INLINE void to_factors(const Vec<T>* kinds, Vec<T>* factors) {
  constexpr std::make_index_sequence<kWidth<T>> lanes;
  constexpr size_t half = kWidth<T> / 2;
  const Vec<T> em[2] = {in_turn<0>(kinds[E], kinds[M], lanes), in_turn<half>(kinds[E], kinds[M], lanes)};
  const Vec<T> ln[2] = {in_turn<0>(kinds[L], kinds[N], lanes), in_turn<half>(kinds[L], kinds[N], lanes)};
  for (int i = 0; i < 2; ++i)
    factors[2 * i] = in_turn<0>(em[i], ln[i], lanes), factors[2 * i + 1] = in_turn<half>(em[i], ln[i], lanes);
}

// The sum of each.
template <typename T>
INLINE typename Simd<T>::V4 sums_of(const Vec<T>* kinds) {
  constexpr int W = kWidth<T>;
  Vec<T> factors[kKinds];
  to_factors<T>(kinds, factors);
  const Vec<T> pairs[2] = {factors[0] + factors[2], factors[1] + factors[3]};
  T lanes[2 * W];
  std::memcpy(lanes, pairs, sizeof lanes);
  typename Simd<T>::V4 sum = {};
  for (int i = 0; i < 2 * W; i += kKinds) {
    typename Simd<T>::V4 part;
    std::memcpy(&part, lanes + i, sizeof part);
    sum += part;
  }
  return sum;
}

template <typename T>
struct Slot {
  T* value = nullptr;
  T* avg = nullptr;
  T* sq = nullptr;
  T* max = nullptr;  // only under amsgrad

  INLINE Slot at(int64_t i) const { return {value + i, avg + i, sq + i, max ? max + i : nullptr}; }
};

struct Hyper {
  double lr, beta1, beta2, eps, weight_decay, grad_scale;
  bool decoupled, maximize, congruent;
  int64_t learned;  // bit k: kind k trains
};

template <typename T>
struct Adam {
  T beta1, one_minus_beta1, beta2, one_minus_beta2, decay;
  T denominator, eps;  // of avg / (sqrt(sq)*denominator + eps), the whole step of raw
  T rates[kKinds];     // of the factors, as multiples of raw's
  bool writes;         // false where lr is 0
};

// One matrix of a parameter.
template <typename T>
struct Matrix {
  int64_t rows, cols;
  void* weight;
  const void* grad;
  at::ScalarType weight_type, grad_type;
  Slot<T> raw, row, col;
  bool has_row, one_row, has_col, has_n;  // one_row: a factor of one number that serves all rows
  T beta;
  Adam<T> adam;
};

template <typename T>
struct RowScales {
  T e, l;       // as they are, 1 without a row factor
  T be, be2;    // e/beta, and its double
  T bl;         // l/beta
  T bm;         // beta*m*log2(e)
  T minus_n;    // -n*log2(e)
  T em, en;     // e*m, e*n
};

template <typename T>
INLINE RowScales<T> row_scales(const Matrix<T>& x, int64_t i) {
  T s[kKinds] = {1, 1, 1, 1};
  if (x.has_row) std::memcpy(s, x.row.value + (x.one_row ? 0 : i * kKinds), sizeof s);
  RowScales<T> r;
  r.e = s[E], r.l = s[L], r.minus_n = s[N] * T(-kLog2E);
  r.be = s[E] / x.beta, r.be2 = r.be + r.be, r.bl = s[L] / x.beta;
  r.bm = T(double(s[M]) * double(x.beta) * kLog2E);
  r.em = s[E] * s[M], r.en = s[E] * s[N];
  return r;
}

// What is learned of the scales of a matrix whose moments are `usual`: nothing, and they have no column factor; nothing; exactly
// e, l, m, and they have one. And all the rest: any set of kinds, or none, with n, or moments that are not usual.
enum Train { kConstant, kFrozen, kUsual, kAny };
constexpr bool learns(Train train) { return train == kUsual || train == kAny; }

// What need not be tested for at every vector, then.
template <typename T>
bool usual_moments(const Matrix<T>& x) {
  return x.adam.writes && !x.raw.max && x.adam.beta1 > T(0.5);
}

// kUsual takes two factors of a row out of its sums when they are complete: not where that divides by next to nothing.
template <typename T>
INLINE bool usual_row(const RowScales<T>& r) {
  const T em = std::abs(r.em), bl = std::abs(r.bl);
  return em > T(1e-6) && em < T(1e6) && bl > T(1e-6) && bl < T(1e6);
}

// What a pass needs of the columns: for each vector of them its patterns and its sums side by side, and nothing that it does not
// need, so that it fills few lines of the cache and fills them evenly. e*m and e*n are what sums are weighted with.
enum Column { kE, kL, kM, kEM, kSumE, kSumL, kSumM, kN, kEN, kSumN, kColumns };
constexpr int pulled(Train train, bool has_n) { return has_n ? kColumns : learns(train) ? kN : kSumE; }
constexpr int pushed(bool has_n) { return has_n ? 4 : 3; }  // e, l, m, n

// Those of a vector of columns from the j-th on; 1 where there are none, 0 past the last column.
template <typename T>
INLINE void column_factors(const Matrix<T>& x, int64_t j, Vec<T>* kinds) {
  constexpr int W = kWidth<T>;
  T some[W * kKinds] = {};
  const T* from = some;
  if (x.has_col && j + W <= x.cols)
    from = x.col.value + j * kKinds;
  else
    for (int64_t i = 0; i < std::min<int64_t>(W, x.cols - j) * kKinds; ++i)
      some[i] = x.has_col ? x.col.value[j * kKinds + i] : T(1);
  Vec<T> factors[kKinds];
  std::memcpy(factors, from, sizeof factors);
  to_kinds<T>(factors, kinds);
}

// The memory that one thread works in: O(cols).
template <typename T>
struct Work {
  static constexpr int W = kWidth<T>;
  int64_t stride = 0;
  std::unique_ptr<char[]> memory;
  T* base = nullptr;
  T scalars[kKinds];

  static int64_t padded(int64_t cols) { return (cols + W - 1) / W * W; }

  void reserve(int64_t cols) {
    stride = padded(cols);
    memory.reset(new char[((kColumns + int(kKinds) + 2) * stride + 6 * W) * sizeof(T) + 64]);
    base = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64);
  }

  // of a vector's first column j, a multiple of W, where `lines` vectors stand side by side
  INLINE T* column(int64_t j, int lines) { return base + j * lines; }
  T* totals(int64_t j) { return base + kColumns * stride + j * kKinds; }
  T* grad() { return base + (kColumns + int(kKinds)) * stride; }
  T* weight() { return grad() + stride; }
  T* edge() { return weight() + stride; }

  // The patterns of all columns; padding is zero.
  void fill(const Matrix<T>& x, int lines, bool push) {
    for (int64_t j = 0; j < x.cols; j += W) {
      Vec<T> kinds[kKinds];
      column_factors(x, j, kinds);
      const auto put = [&, to = column(j, lines)](int line, Vec<T> value) { store(to + line * W, value); };
      const Vec<T> e = kinds[E], m = kinds[M], n = kinds[N];
      put(kE, e), put(kL, kinds[L]), put(kM, m);
      if (push && lines > kM + 1) put(kM + 1, n);
      if (push) continue;
      put(kEM, e * m);
      if (lines > kN) put(kN, n), put(kEN, e * n);
    }
  }

  void clear_totals(int64_t cols) { std::memset(totals(0), 0, padded(cols) * kKinds * sizeof(T)); }

  void clear_sums(int64_t cols, int lines) {
    each_sum(cols, lines, [](T* sum, T*) { store(sum, Vec<T>{}); });
  }

  void add_sums_to_totals(int64_t cols, int lines) {
    each_sum(cols, lines, [](T* sum, T* total) { store(total, load(total) + load(sum)); });
  }

 private:
  template <typename F>
  void each_sum(int64_t cols, int lines, const F& f) {
    constexpr int sums[kKinds] = {kSumE, kSumL, kSumM, kSumN};
    for (int64_t j = 0; j < padded(cols); j += W)
      for (int k = 0; k < kKinds; ++k)
        if (sums[k] < lines) f(column(j, lines) + sums[k] * W, totals(j) + k * W);
  }
};

// ---------------------------------------------------------------------------------------------------------------- the rows

template <typename T>
inline void read_row(T* to, const void* from, at::ScalarType type, int64_t offset, int64_t n) {
  switch (type) {
    case at::kBFloat16: {
      const auto* p = static_cast<const at::BFloat16*>(from) + offset;
      for (int64_t j = 0; j < n; ++j) to[j] = T(float(p[j]));
      break;
    }
    case at::kHalf: {
      const auto* p = static_cast<const at::Half*>(from) + offset;
      for (int64_t j = 0; j < n; ++j) to[j] = T(float(p[j]));
      break;
    }
    case at::kFloat: {
      const auto* p = static_cast<const float*>(from) + offset;
      for (int64_t j = 0; j < n; ++j) to[j] = T(p[j]);
      break;
    }
    default: {
      const auto* p = static_cast<const double*>(from) + offset;
      for (int64_t j = 0; j < n; ++j) to[j] = T(p[j]);
    }
  }
}

template <typename T>
inline void write_row(const T* from, void* to, at::ScalarType type, int64_t offset, int64_t n) {
  switch (type) {
    case at::kBFloat16: {
      auto* p = static_cast<at::BFloat16*>(to) + offset;
      for (int64_t j = 0; j < n; ++j) p[j] = at::BFloat16(float(from[j]));
      break;
    }
    case at::kHalf: {
      auto* p = static_cast<at::Half*>(to) + offset;
      for (int64_t j = 0; j < n; ++j) p[j] = at::Half(float(from[j]));
      break;
    }
    default:
      std::memcpy(static_cast<T*>(to) + offset, from, n * sizeof(T));
  }
}

template <typename T>
constexpr at::ScalarType kOwn = std::is_same<T, double>::value ? at::kDouble : at::kFloat;

// The gradient of a row as torch.optim.Adam would see it; a pointer to it, or to a copy.
template <typename T>
const T* gradient(const Matrix<T>& x, const Hyper& h, int64_t i, Work<T>& work) {
  const bool coupled = h.weight_decay != 0 && !h.decoupled;
  if (x.grad_type == kOwn<T> && !h.maximize && !coupled && h.grad_scale == 1)
    return static_cast<const T*>(x.grad) + i * x.cols;
  T* g = work.grad();
  read_row(g, x.grad, x.grad_type, i * x.cols, x.cols);
  const T factor = T((h.maximize ? -1.0 : 1.0) / h.grad_scale);
  for (int64_t j = 0; j < x.cols; ++j) g[j] *= factor;
  if (coupled) {
    T* w = work.weight();
    read_row(w, x.weight, x.weight_type, i * x.cols, x.cols);
    const T decay = T(h.weight_decay);
    for (int64_t j = 0; j < x.cols; ++j) g[j] += decay * w[j];
  }
  return g;
}

// row[i] * col[j] for P vectors, whose columns' patterns stand in c, `lines` vectors side by side.
template <int P, Train train, typename T>
INLINE Vecs<T, P> product(T row, const T* c, int lines, int which) {
  if (train == kConstant) return EACH_OF((void(i), row - Vec<T>{}));
  return EACH_OF(load(c + (which + i * lines) * kWidth<T>) * row);
}

template <int P, Train train, typename T>
INLINE Vecs<T, P> shift(const RowScales<T>& r, const T* c, int lines, int which) {
  return exp_base2<T, P>(product<P, train>(r.minus_n, c, lines, which));
}

// Half of X for vectors of a row. c: their columns' patterns, `lines` vectors side by side.
template <int P, Train train, typename T>
INLINE Vecs<T, P> half_of_X(const Vecs<T, P>& raw, const RowScales<T>& r, const T* c, int lines) {
  const auto a = EACH_OF(flip<T>(raw.v[i], sign_bit<T>(raw.v[i])));
  return half_expm1_base2<T, P>(a * product<P, train>(r.bm, c, lines, kM));
}

// weight = s*(e/beta)*N*X + (l/beta)*(a or raw). c: the columns' patterns as `push` or `pull` has them.
template <typename T, bool congruent, Train train, bool has_n, int P>
INLINE Vecs<T, P> map(const Vecs<T, P>& raw, const RowScales<T>& r, const T* c) {
  constexpr int lines = learns(train) ? pushed(has_n) : pulled(train, has_n);
  const auto half = half_of_X<P, train>(raw, r, c, lines);
  const auto sign = EACH_OF(sign_bit<T>(raw.v[i]));
  const auto a = EACH_OF(flip<T>(raw.v[i], sign.v[i]));
  const auto signed_half = EACH_OF(flip<T>(half.v[i], sign.v[i]));
  auto be2 = product<P, train>(r.be2, c, lines, kE);
  if (has_n) be2 = be2 * shift<P, train>(r, c, lines, learns(train) ? kM + 1 : kN);
  return signed_half * be2 + product<P, train>(r.bl, c, lines, kL) * (congruent ? raw : a);
}

// Vectors of a row: d loss / d raw, and their share in the factors' gradients. c: their columns' patterns and sums. In the usual case
// what is shared has been multiplied by the row's factor, which the slope needs anyway: columns add it up as it is, and rows
// divide their sums in the end. `meanwhile` is called before anything is stored.
template <typename T, bool congruent, Train train, bool has_n, int P, typename F>
INLINE Vecs<T, P> pull(const Vecs<T, P>& half, const Vecs<T, P>& g, const Vecs<T, P>& raw, const RowScales<T>& r, T* c,
                       int64_t learned, bool has_col, Vec<T>* sums, const F& meanwhile) {
  constexpr int W = kWidth<T>, lines = pulled(train, has_n);
  const auto of_column = [&](int which) __attribute__((always_inline)) {
    return EACH_OF(load(c + (which + i * lines) * W));
  };
  const auto sign = EACH_OF(sign_bit<T>(raw.v[i]));
  const auto a = EACH_OF(flip<T>(raw.v[i], sign.v[i]));
  const auto X = half + half;
  const auto signed_g = EACH_OF(flip<T>(g.v[i], sign.v[i]));
  auto linear = congruent ? g : signed_g;
  auto curved = g * X + g;  // g*(1 + X)*N
  auto U = signed_g * X;
  if (has_n) {
    const auto shrink = shift<P, train>(r, c, lines, kN);
    curved = curved * shrink, U = U * shrink;
  }
  meanwhile();
  if (train == kUsual) linear = linear * r.bl, curved = curved * r.em;
  bool ordinary = false;
  if (learns(train)) {
    const auto V = linear * raw, W_ = curved * raw;
    // Not finite where a share is not: W alone would do where V has not been multiplied by a factor of its own.
    const auto any = train == kUsual ? V + W_ : W_;
    // Almost always there is nothing to look at in any lane.
    auto all = any.v[0], least = a.v[0];
#pragma GCC unroll 8
    for (int i = 1; i < P; ++i) all = all + any.v[i], least = smaller(least, a.v[i]);
    ordinary = finite_and_not_zero(all, least);
    // plus(i, x, y, sum) is sum + x*y for vector i of the pack
    const auto add = [&](auto plus) __attribute__((always_inline)) {
      const auto kind = [&](Kind k, const Vecs<T, P>& share, const Vecs<T, P>& of_columns, T of_row, Column sum)
                            __attribute__((always_inline)) {
        if (train == kAny && !(learned >> k & 1)) return;
#pragma GCC unroll 8
        for (int i = 0; i < P; ++i) {
          sums[k] = plus(i, share.v[i], of_columns.v[i], sums[k]);
          T* column = c + (sum + i * lines) * W;
          if (train == kUsual || has_col) store(column, plus(i, share.v[i], of_row - Vec<T>{}, load(column)));
        }
      };
      kind(E, U, of_column(kE), r.be, kSumE);
      kind(L, V, of_column(kL), train == kUsual ? T(1) : r.bl, kSumL);
      kind(M, W_, of_column(kEM), train == kUsual ? T(1) : r.em, kSumM);
      if (has_n) kind(N, U, of_column(kEN), r.en, kSumN);
    };
    if (__builtin_expect(ordinary, true)) {
      add([](int, Vec<T> x, Vec<T> y, Vec<T> sum) __attribute__((always_inline)) { return sum + x * y; });
    } else {
      // A number that is not finite would spread over its whole row and column.
      const auto lanes = EACH_OF(finite(any.v[i]));
      add([&](int i, Vec<T> x, Vec<T> y, Vec<T> sum) __attribute__((always_inline)) {
        return add_where(lanes.v[i], x, y, sum);
      });
    }
  }
  const auto em = train == kUsual ? of_column(kEM) : product<P, train>(r.em, c, lines, kEM);
  const auto bl = train == kUsual ? of_column(kL) : product<P, train>(r.bl, c, lines, kL);
  const auto slope = curved * em;
  if (congruent || ordinary) return linear * bl + slope;
  // s is 0 at 0: the slope there is the mean of the two one-sided ones
  return EACH_OF(add_where(not_zero(raw.v[i]), linear.v[i], bl.v[i], slope.v[i]));
}

// Adam on P vectors from the place on that `s` points to.
template <int P, bool usual, typename T>
INLINE void update(const Vecs<T, P>& grad, const Slot<T>& s, const Adam<T>& adam) {
  const auto raw = load<P>(s.value), old = load<P>(s.avg);
  // as torch's lerp; the other form keeps grad whole where beta1 is small
  const auto avg = usual || adam.beta1 > T(0.5) ? old + (grad - old) * adam.one_minus_beta1
                                                : old * adam.beta1 + grad * adam.one_minus_beta1;
  auto sq = load<P>(s.sq) * adam.beta2 + grad * (grad * adam.one_minus_beta2);
  store(s.avg, avg);
  store(s.sq, sq);
  if (!usual && s.max) {
    const auto max = load<P>(s.max);
    sq = EACH_OF(sq.v[i] <= max.v[i] ? max.v[i] : sq.v[i]);
    store(s.max, sq);
  }
  if (!usual && !adam.writes) return;
  const auto root = EACH_OF(square_root(sq.v[i]));
  store(s.value, raw * adam.decay - avg / (root * adam.denominator + adam.eps));
}

// Adam on some entries of a factor, of four kinds each: as many as fill a V.
template <typename V, typename T>
INLINE void factor_step(const Adam<T>& adam, const Slot<T>& s, V g) {
  V value, avg, sq, rate;
  for (size_t k = 0; k < sizeof rate / sizeof adam.rates; ++k)
    std::memcpy(reinterpret_cast<char*>(&rate) + k * sizeof adam.rates, adam.rates, sizeof adam.rates);
  std::memcpy(&value, s.value, sizeof g);
  std::memcpy(&avg, s.avg, sizeof g);
  std::memcpy(&sq, s.sq, sizeof g);
  avg = avg * adam.beta1 + g * adam.one_minus_beta1;
  sq = sq * adam.beta2 + g * (g * adam.one_minus_beta2);
  std::memcpy(s.avg, &avg, sizeof g);
  std::memcpy(s.sq, &sq, sizeof g);
  if (s.max) {
    V max;
    std::memcpy(&max, s.max, sizeof g);
    sq = sq <= max ? max : sq;
    std::memcpy(s.max, &sq, sizeof g);
  }
  if (!adam.writes) return;
  // a frozen kind has the rate 0, and 0/0 with eps = 0
  value = rate == V{} ? value : value - rate * (avg / (square_root(sq) * adam.denominator + adam.eps));
  std::memcpy(s.value, &value, sizeof g);
}

// The processor's own prefetching keeps up with the state only while the columns' lines stay in the first cache: what is fetched of
// them again from the second takes its place.
template <typename T>
bool far(int lines, int64_t cols) {
  return lines * cols * int64_t(sizeof(T)) >= 12 << 10;
}

// A page ahead, into the second cache: the first is the columns'.
template <int P, typename T>
INLINE void prefetch(const T* from) {
#pragma GCC unroll 8
  for (int i = 0; i < P; ++i) __builtin_prefetch(reinterpret_cast<const char*>(from + i * kWidth<T>) + 4096, 0, 2);
}

// A row's last columns, where they do not fill a vector: worked on in padded copies.
template <typename T>
struct Edge {
  T* memory;
  int64_t count;

  T* take(int slot, const T* from) const {
    T* to = memory + slot * kWidth<T>;
    std::fill(to, to + kWidth<T>, T(0));
    std::copy(from, from + count, to);
    return to;
  }
  void give(int slot, T* to) const { std::copy(memory + slot * kWidth<T>, memory + slot * kWidth<T> + count, to); }
};

// Row i through pull, update and (where nothing is learned) map. Three packs are under way at once, so that nothing waits for what
// takes long: beside the sums of one run the exponentials of the next and the root and division of the one before.
template <typename T, bool congruent, Train train, bool has_n>
INLINE void pull_row(const Matrix<T>& x, const Hyper& h, int64_t i, const RowScales<T>& scales, Work<T>& work) {
  using V4 = typename Simd<T>::V4;
  constexpr int W = kWidth<T>, lines = pulled(train, has_n);
  constexpr bool maps = !learns(train);
  const bool direct = x.weight_type == kOwn<T>;
  const Adam<T> adam = x.adam;
  const Slot<T> state = x.raw.at(i * x.cols);
  const T* grad = gradient(x, h, i, work);
  T* weight = direct ? static_cast<T*>(x.weight) + i * x.cols : work.weight();
  const bool fetches = learns(train) && far<T>(lines, x.cols);
  Vec<T> sums[kKinds]{};
  // `total` vectors of a row, a multiple of `count`; c: their columns' lines
  const auto step = [&]<int count>(const T* grad, const Slot<T>& state, T* weight, T* c, int64_t total)
                        __attribute__((always_inline)) {
    const auto half_at = [&](int64_t k) __attribute__((always_inline)) {
      return half_of_X<count, train>(load<count>(state.value + k * W), scales, c + k * lines * W, lines);
    };
    const auto pull_at = [&](int64_t k, const Vecs<T, count>& half, const auto& meanwhile) __attribute__((always_inline)) {
      const Slot<T> at = state.at(k * W);
      if (fetches)
        prefetch<count>(grad + k * W), prefetch<count>(at.value), prefetch<count>(at.avg), prefetch<count>(at.sq);
      return pull<T, congruent, train, has_n, count>(half, load<count>(grad + k * W), load<count>(at.value), scales,
                                                     c + k * lines * W, h.learned, x.has_col, sums, meanwhile);
    };
    const auto update_at = [&](int64_t k, const Vecs<T, count>& slope) __attribute__((always_inline)) {
      update<count, train != kAny>(slope, state.at(k * W), adam);
    };
    const int64_t last = total - count;
    const auto first_half = half_at(0);
    auto half = half_at(std::min<int64_t>(count, last));  // after the last there is none: its own again costs less than a branch
    auto slope = pull_at(0, first_half, [] {});
    for (int64_t k = count; k <= last; k += count) {
      const auto next = half_at(std::min(k + count, last));
      slope = pull_at(k, half, [&]() __attribute__((always_inline)) { update_at(k - count, slope); });
      half = next;
    }
    update_at(last, slope);
    for (int64_t k = 0; maps && k < total; k += count)
      store(weight + k * W, map<T, congruent, train, has_n, count>(load<count>(state.value + k * W), scales, c + k * lines * W));
  };
  const int64_t whole = x.cols / (kPack * W) * kPack * W, strip = maps ? kStrip * W : whole;
  int64_t j = 0;
  for (; j < whole; j += strip) {
    const int64_t total = std::min(strip, whole - j) / W;
    step.template operator()<kPack>(grad + j, state.at(j), weight + j, work.column(j, lines), total);
  }
  for (j = whole; j + W <= x.cols; j += W)
    step.template operator()<1>(grad + j, state.at(j), weight + j, work.column(j, lines), 1);
  if (j < x.cols) {
    const Edge<T> edge{work.edge(), x.cols - j};
    const Slot<T> rest = state.at(j);
    const Slot<T> copy{edge.take(0, rest.value), edge.take(1, rest.avg), edge.take(2, rest.sq),
                       rest.max ? edge.take(3, rest.max) : nullptr};
    step.template operator()<1>(edge.take(4, grad + j), copy, edge.memory + 5 * W, work.column(j, lines), 1);
    edge.give(1, rest.avg), edge.give(2, rest.sq);
    if (rest.max) edge.give(3, rest.max);
    if (adam.writes) edge.give(0, rest.value);
    if (maps) edge.give(5, weight + j);
  }
  if (maps && !direct) write_row(weight, x.weight, x.weight_type, i * x.cols, x.cols);
  if (!learns(train) || !x.has_row) return;
  const bool taken_out = train == kUsual;
  const V4 units = {1 / x.beta, taken_out ? 1 / scales.l : 1 / x.beta, taken_out ? scales.e / scales.em : scales.e, -scales.be};
  const V4 found = sums_of<T>(sums) * units;
  if (x.one_row)
    for (int k = 0; k < kKinds; ++k) work.scalars[k] += found[k];
  else if (h.learned)
    factor_step<V4>(x.adam, x.row.at(i * kKinds), found);
}

template <typename T, bool congruent, Train train, bool has_n>
INLINE void push_row(const Matrix<T>& x, int64_t i, Work<T>& work) {
  constexpr int W = kWidth<T>, lines = pushed(has_n);
  const bool direct = x.weight_type == kOwn<T>;
  const RowScales<T> scales = row_scales(x, i);
  const T* raw = x.raw.value + i * x.cols;
  T* weight = direct ? static_cast<T*>(x.weight) + i * x.cols : work.weight();
  const bool fetches = far<T>(lines, x.cols);
  // Past the caches, which need not fetch what is written whole. Every vector of every row must be aligned.
  const bool past = fetches && direct && x.cols % W == 0 && reinterpret_cast<uintptr_t>(weight) % kBytes == 0;
  const auto step = [&]<int count>(const T* raw, T* weight, int64_t j) __attribute__((always_inline)) {
    const auto moved = map<T, congruent, train, has_n, count>(load<count>(raw), scales, work.column(j, lines));
    if (!past) return store(weight, moved);
    for (int k = 0; k < count; ++k) stream(weight + k * W, moved.v[k]);
  };
  int64_t j = 0;
  for (; j + kPush * W <= x.cols; j += kPush * W) {
    if (fetches) {
      prefetch<kPush>(raw + j);
      if (!past) prefetch<kPush>(weight + j);
    }
    step.template operator()<kPush>(raw + j, weight + j, j);
  }
  for (; j + W <= x.cols; j += W) step.template operator()<1>(raw + j, weight + j, j);
  if (j < x.cols) {
    const Edge<T> edge{work.edge(), x.cols - j};
    step.template operator()<1>(edge.take(0, raw + j), edge.memory + W, j);
    edge.give(1, weight + j);
  }
  if (!direct) write_row(weight, x.weight, x.weight_type, i * x.cols, x.cols);
}

// ---------------------------------------------------------------------------------------------------------- whole matrices

constexpr int64_t kChunk = 128;  // rows whose column sums are added up before they join the total: short chains round less

template <typename T, bool congruent, Train train, bool has_n>
void pull_rows(const Matrix<T>& x, const Hyper& h, int64_t from, int64_t to, Work<T>& work) {
  constexpr int lines = pulled(train, has_n);
  const bool sums = learns(train) && x.has_col;
  if (train != kConstant) work.fill(x, lines, false);
  std::fill(work.scalars, work.scalars + kKinds, T(0));
  if (sums) work.clear_totals(x.cols);
  for (int64_t first = from; first < to; first += kChunk) {
    const int64_t last = std::min(to, first + kChunk);
    if (sums) work.clear_sums(x.cols, lines);
    for (int64_t i = first; i < last; ++i) {
      const RowScales<T> scales = row_scales(x, i);
      if (train == kUsual && !usual_row(scales))
        pull_row<T, congruent, kAny, has_n>(x, h, i, scales, work);
      else
        pull_row<T, congruent, train, has_n>(x, h, i, scales, work);
    }
    if (sums) work.add_sums_to_totals(x.cols, lines);
  }
}

template <typename T, bool congruent, Train train, bool has_n>
void push_rows(const Matrix<T>& x, int64_t from, int64_t to, Work<T>& work) {
  work.fill(x, pushed(has_n), true);
  for (int64_t i = from; i < to; ++i) push_row<T, congruent, train, has_n>(x, i, work);
  end_of_stream();
}

// Adam on what all rows have a share in: the column factors, and a row factor of one number. `works` in the order of their rows.
template <typename T>
void finish_factors(const Matrix<T>& x, const std::vector<Work<T>*>& works) {
  using V4 = typename Simd<T>::V4;
  constexpr int W = kWidth<T>;
  for (int64_t j = 0; x.has_col && j < x.cols; j += W) {
    Vec<T> e[kKinds], found[kKinds] = {}, gradients[kKinds];
    column_factors(x, j, e);
    for (Work<T>* work : works)
      for (int k = 0; k < kKinds; ++k) found[k] += load(work->totals(j) + k * W);
    found[M] *= e[E], found[N] *= -e[E] / x.beta;
    to_factors<T>(found, gradients);
    const Slot<T> s = x.col.at(j * kKinds);
    if (W >= kKinds && j + W <= x.cols) {
      for (int k = 0; k < kKinds; ++k) factor_step(x.adam, s.at(k * W), gradients[k]);
    } else {
      for (int64_t i = 0; i < std::min<int64_t>(W, x.cols - j); ++i) {
        V4 gradient;
        std::memcpy(&gradient, reinterpret_cast<const char*>(gradients) + i * sizeof gradient, sizeof gradient);
        factor_step(x.adam, s.at(i * kKinds), gradient);
      }
    }
  }
  if (x.has_row && x.one_row) {
    V4 found = {};
    for (Work<T>* work : works)
      for (int k = 0; k < kKinds; ++k) found[k] += work->scalars[k];
    factor_step(x.adam, x.row, found);
  }
}

// `body` with the two passes over rows that are compiled for this kind of matrix, and whether the second is needed.
template <typename T, bool congruent, typename F>
void by_kind(const Matrix<T>& x, const Hyper& h, const F& body) {
  const auto with = [&]<Train train, bool has_n>() {
    body(pull_rows<T, congruent, train, has_n>, push_rows<T, congruent, train, has_n>, learns(train) && x.adam.writes);
  };
  if (x.has_n)
    with.template operator()<kAny, true>();
  else if (usual_moments(x) && h.learned == (1 << E | 1 << L | 1 << M) && x.has_col)
    with.template operator()<kUsual, false>();
  else if (usual_moments(x) && h.learned == 0 && x.has_col)
    with.template operator()<kFrozen, false>();
  else if (usual_moments(x) && h.learned == 0)
    with.template operator()<kConstant, false>();
  else
    with.template operator()<kAny, false>();
}

template <typename T, typename F>
void by_kind(const Matrix<T>& x, const Hyper& h, const F& body) {
  if (h.congruent)
    by_kind<T, true>(x, h, body);
  else
    by_kind<T, false>(x, h, body);
}

constexpr int64_t kAlone = 1 << 16;  // fewer elements than these are one thread's work

// Some rows of a matrix of which other threads have the rest.
template <typename T>
struct Part {
  const Matrix<T>* matrix;
  int64_t thread, from, to;
  Work<T> work;
};

// The matrices stand in a line that is cut into equal lengths, one for each thread. What lies in one length is stepped without a look
// at the others; of a matrix that is cut the threads pull their parts, and push them when its factors have moved. Where the cuts
// are depends on the sizes and the number of threads alone, so that results repeat.
template <typename T>
void step_all(const std::vector<Matrix<T>>& matrices, const Hyper& h) {
  int64_t total = 0, before = 0;
  for (const auto& x : matrices) total += x.rows * x.cols;
  const int64_t threads = std::clamp<int64_t>(total / (kAlone / 2), 1, at::get_num_threads());
  std::vector<std::vector<const Matrix<T>*>> whole(threads);
  std::vector<Part<T>> parts;
  std::vector<std::pair<size_t, size_t>> cut;  // the parts of one matrix: the first, and the one after the last
  for (const auto& x : matrices) {
    const int64_t size = x.rows * x.cols;
    const int64_t sliver = size < kAlone ? size / 2 + 1 : kAlone / 4;  // a cut as near to an end as this is made there
    const auto first_row = [&](int64_t thread) {
      const int64_t at = thread * total / threads - before;
      return thread == threads || at > size - sliver ? x.rows : at < sliver ? 0 : at / x.cols;
    };
    const size_t first = parts.size();
    for (int64_t t = 0, from = 0; t < threads; ++t) {
      const int64_t to = first_row(t + 1);
      if (from == 0 && to == x.rows)
        whole[t].push_back(&x);
      else if (from < to)
        parts.push_back({&x, t, from, to, {}});
      from = to;
    }
    if (parts.size() > first) cut.emplace_back(first, parts.size());
    before += size;
  }
  const auto each_thread = [&](int64_t count, const auto& body) {
    at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) body(k);
    });
  };
  each_thread(threads, [&](int64_t thread) {
    Work<T> work;
    for (const Matrix<T>* x : whole[thread]) {
      by_kind(*x, h, [&](auto pull, auto push, bool pushes) {
        work.reserve(x->cols);
        pull(*x, h, 0, x->rows, work);
        if (h.learned) finish_factors(*x, {&work});
        if (pushes) push(*x, 0, x->rows, work);
      });
    }
    for (Part<T>& part : parts) {
      if (part.thread != thread) continue;
      part.work.reserve(part.matrix->cols);
      by_kind(*part.matrix, h, [&](auto pull, auto, bool) { pull(*part.matrix, h, part.from, part.to, part.work); });
    }
  });
  if (cut.empty()) return;
  if (h.learned) {
    each_thread(cut.size(), [&](int64_t k) {
      std::vector<Work<T>*> works;
      for (size_t part = cut[k].first; part < cut[k].second; ++part) works.push_back(&parts[part].work);
      finish_factors(*parts[cut[k].first].matrix, works);
    });
  }
  each_thread(threads, [&](int64_t thread) {
    for (Part<T>& part : parts) {
      by_kind(*part.matrix, h, [&](auto, auto push, bool pushes) {
        if (pushes && part.thread == thread) push(*part.matrix, part.from, part.to, part.work);
      });
    }
  });
}

// ------------------------------------------------------------------------------------------------------------ torch's side

// The six ints of a parameter: batch, rows, cols, length of the row factor, length of the column factor (0: none), has n.
// Its seven numbers: beta, step (counting this one), what lr is divided by for raw, four rates of the scales.
constexpr int64_t kInts = 6, kNumbers = 7;

template <typename T>
Slot<T> slot(at::TensorList tensors, size_t& next, bool amsgrad, int64_t numel) {
  const auto data = [&]() -> T* {
    const at::Tensor& t = tensors[next++];
    TORCH_CHECK(t.scalar_type() == kOwn<T> && t.is_contiguous() && t.numel() == numel && t.device().is_cpu(),
                "seloptim: state of another dtype, layout, size or device than its parameter asks for");
    return t.data_ptr<T>();
  };
  Slot<T> s;
  s.value = data(), s.avg = data(), s.sq = data();
  if (amsgrad) s.max = data();
  return s;
}

template <typename T>
void step_of(at::TensorList weights, at::TensorList grads, at::TensorList state, at::IntArrayRef ints,
             at::ArrayRef<double> numbers, const Hyper& h, bool amsgrad) {
  std::vector<Matrix<T>> matrices;
  size_t next = 0;
  for (size_t p = 0; p < weights.size(); ++p) {
    const int64_t* shape = &ints[p * kInts];
    const double* number = &numbers[p * kNumbers];
    const int64_t batch = shape[0], rows = shape[1], cols = shape[2];
    int64_t row_length = shape[3], col_length = shape[4];
    const int64_t numel = batch * rows * cols;
    const at::Tensor &weight = weights[p], &grad = grads[p];
    TORCH_CHECK(weight.is_contiguous() && grad.is_contiguous() && weight.numel() == numel && grad.numel() == numel &&
                    weight.device().is_cpu() && grad.device().is_cpu(),
                "seloptim: a parameter or gradient of another layout, size or device than its state");
    Matrix<T> x;
    x.raw = slot<T>(state, next, amsgrad, numel);
    if (row_length) x.row = slot<T>(state, next, amsgrad, batch * row_length * kKinds);
    if (col_length) x.col = slot<T>(state, next, amsgrad, batch * col_length * kKinds);
    x.rows = rows, x.cols = cols;
    if (cols == 1 && rows > 1) {
      // A column is worked on as a row, which fills vectors.
      std::swap(x.rows, x.cols);
      if (row_length != 1) {
        std::swap(x.row, x.col);
        std::swap(row_length, col_length);
      }
    }
    x.has_row = row_length > 0, x.one_row = row_length == 1, x.has_col = col_length > 0, x.has_n = shape[5];
    x.weight_type = weight.scalar_type(), x.grad_type = grad.scalar_type();
    x.beta = T(number[0]);
    const double correction1 = 1 - std::pow(h.beta1, number[1]), correction2 = 1 - std::pow(h.beta2, number[1]);
    const double rate = h.lr / number[2] / correction1;
    x.adam = {T(h.beta1), T(1 - h.beta1), T(h.beta2), T(1 - h.beta2), T(h.decoupled ? 1 - h.lr * h.weight_decay : 1.0),
              T(1 / (std::sqrt(correction2) * rate)), T(h.eps / rate), {}, h.lr != 0};
    for (int k = 0; k < kKinds; ++k) x.adam.rates[k] = T(number[3 + k] * number[2]);
    if (numel == 0) continue;
    for (int64_t b = 0; b < batch; ++b) {
      Matrix<T> one = x;
      const int64_t at = b * rows * cols;
      one.raw = x.raw.at(at);
      if (row_length) one.row = x.row.at(b * row_length * kKinds);
      if (col_length) one.col = x.col.at(b * col_length * kKinds);
      one.weight = static_cast<char*>(weight.data_ptr()) + at * weight.element_size();
      one.grad = static_cast<const char*>(grad.const_data_ptr()) + at * grad.element_size();
      matrices.push_back(one);
    }
    weight.unsafeGetTensorImpl()->bump_version();
  }
  step_all(matrices, h);
}

void raise_by_one(at::TensorList counts) {
  for (const at::Tensor& count : counts) {
    if (count.scalar_type() == at::kFloat && count.numel() == 1 && count.device().is_cpu()) {
      *count.data_ptr<float>() += 1;  // as we make them; ATen's own takes a while to wake up
      count.unsafeGetTensorImpl()->bump_version();
    } else {
      count.add_(1);
    }
  }
}

void step(at::TensorList weights, at::TensorList grads, at::TensorList state, at::IntArrayRef ints,
          at::ArrayRef<double> numbers, at::TensorList counts, double lr, double beta1, double beta2, double eps,
          double weight_decay, bool decoupled, bool amsgrad, bool maximize, bool congruent, int64_t learned,
          const std::optional<at::Tensor>& grad_scale) {
  TORCH_CHECK(weights.size() == grads.size() && ints.size() == weights.size() * kInts &&
                  numbers.size() == weights.size() * kNumbers,
              "seloptim: lists of different lengths");
  if (weights.empty()) return;
  const double scale = grad_scale ? grad_scale->item<double>() : 1.0;
  const Hyper h{lr, beta1, beta2, eps, weight_decay, scale, decoupled, maximize, congruent, learned};
  if (weights[0].scalar_type() == at::kDouble)
    step_of<double>(weights, grads, state, ints, numbers, h, amsgrad);
  else
    step_of<float>(weights, grads, state, ints, numbers, h, amsgrad);
  raise_by_one(counts);
}

}  // namespace

TORCH_LIBRARY(seloptim, m) {
  m.def(
      "step_(Tensor(a!)[] weights, Tensor[] grads, Tensor(b!)[] state, int[] ints, float[] numbers, Tensor(c!)[] counts, "
      "float lr, float beta1, float beta2, float eps, float weight_decay, bool decoupled, bool amsgrad, bool maximize, "
      "bool congruent, int learned, Tensor? grad_scale) -> ()");
}

TORCH_LIBRARY_IMPL(seloptim, CPU, m) { m.impl("step_", step); }

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
  static constexpr float high = 128.4f, low = -124.4f;  // beyond: infinite, or -1 (and 0 for the exponential)
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

constexpr int64_t kStrip = 8;  // vectors worked on together

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

template <typename T>
INLINE T horizontal_sum(Vec<T> v) {
  T lanes[kWidth<T>];
  std::memcpy(lanes, &v, sizeof v);
  for (int half = kWidth<T> / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
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

// Written so that NaN passes: these instructions return their second operand then.
INLINE Vec<float> clamp(Vec<float> y) {
#if defined(__AVX512F__)
  y = (Vec<float>)_mm512_min_ps(_mm512_set1_ps(Simd<float>::high), (__m512)y);
  return (Vec<float>)_mm512_max_ps(_mm512_set1_ps(Simd<float>::low), (__m512)y);
#elif defined(__AVX__)
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

// 2^y = 2*half*(1 + part): `half` is a power of two that never overflows, `part` is accurate near zero.
template <typename T>
INLINE void exp2_parts(Vec<T> y, Vec<T>& half, Vec<T>& part) {
  using S = Simd<T>;
  y = clamp(y);
  const Vec<T> t = y + S::round;
  const Vec<T> f = y - (t - S::round);
  constexpr int terms = sizeof(S::poly) / sizeof(T);
  Vec<T> q = S::poly[terms - 1] - Vec<T>{};
#pragma GCC unroll 16
  for (int i = terms - 2; i >= 0; --i) q = q * f + S::poly[i];
  part = q * f;
  half = (Vec<T>)(((Mask<T>)t << S::mantissa) + (typename S::Bits(S::bias - 1) << S::mantissa));
}

template <typename T>
INLINE Vec<T> expm1_base2(Vec<T> y) {
  Vec<T> half, part;
  exp2_parts<T>(y, half, part);
  const Vec<T> x = half * part + (half - T(0.5));
  return x + x;
}

template <typename T>
INLINE Vec<T> exp_base2(Vec<T> y) {
  Vec<T> half, part;
  exp2_parts<T>(y, half, part);
  const Vec<T> x = half * part + half;
  return x + x;
}

constexpr double kLog2E = 1.4426950408889634074;

// --------------------------------------------------------------------------------------------------------- what is stepped

enum Kind { E, L, M, N, kKinds };

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
  T e, m, n;    // as they are, 1 without a row factor
  T be, bl;     // e/beta, l/beta
  T bm;         // beta*m*log2(e)
  T l;
  T em, en;     // e*m, e*n
};

template <typename T>
INLINE RowScales<T> row_scales(const Matrix<T>& x, int64_t i) {
  T s[kKinds] = {1, 1, 1, 1};
  if (x.has_row) std::memcpy(s, x.row.value + (x.one_row ? 0 : i * kKinds), sizeof s);
  RowScales<T> r;
  r.e = s[E], r.l = s[L], r.m = s[M], r.n = s[N];
  r.be = s[E] / x.beta, r.bl = s[L] / x.beta;
  r.bm = T(double(s[M]) * double(x.beta) * kLog2E);
  r.em = s[E] * s[M], r.en = s[E] * s[N];
  return r;
}

// The columns as one thread sees them: for each vector of columns its patterns and its sums side by side. As arrays of
// their own, whose distance is often a multiple of 4096 bytes, they would compete for the same lines of the cache.
// e*m and e*n are what sums are weighted with; padding is zero.
enum Column { kE, kL, kM, kEM, kN, kEN, kSums, kTotals = kSums + kKinds, kColumn = kTotals + kKinds };

// The memory that one thread works in: O(cols).
template <typename T>
struct Work {
  static constexpr int W = kWidth<T>;
  int64_t stride = 0;
  std::vector<char> memory;
  T* base = nullptr;
  T scalars[kKinds];

  static int64_t padded(int64_t cols) { return (cols + W - 1) / W * W; }

  void reserve(int64_t cols) {
    stride = padded(cols);
    memory.resize(((kColumn + 2) * stride + (kStrip + 6) * W) * sizeof(T) + 64);
    base = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
  }

  INLINE T* column(int64_t j) { return base + j * kColumn; }  // j: a multiple of W
  INLINE T& entry(int which, int64_t j) { return base[j / W * W * kColumn + which * W + j % W]; }
  T* grad() { return base + kColumn * stride; }
  T* weight() { return base + (kColumn + 1) * stride; }
  T* strip() { return base + (kColumn + 2) * stride; }
  T* edge() { return strip() + kStrip * W; }

  void fill(const Matrix<T>& x) {
    for (int64_t j = 0; j < padded(x.cols); ++j) {
      T s[kKinds] = {0, 0, 0, 0};
      if (j < x.cols && x.has_col)
        std::memcpy(s, x.col.value + j * kKinds, sizeof s);
      else if (j < x.cols)
        std::fill(s, s + kKinds, T(1));
      entry(kE, j) = s[E], entry(kL, j) = s[L], entry(kM, j) = s[M], entry(kN, j) = s[N];
      entry(kEM, j) = s[E] * s[M], entry(kEN, j) = s[E] * s[N];
    }
  }

  void clear(int which, int64_t cols) {
    for (int64_t j = 0; j < padded(cols); j += W)
      for (int k = 0; k < kKinds; ++k) store(column(j) + (which + k) * W, Vec<T>{});
  }

  void add_sums_to_totals(int64_t cols) {
    for (int64_t j = 0; j < padded(cols); j += W)
      for (int k = 0; k < kKinds; ++k) {
        T* total = column(j) + (kTotals + k) * W;
        store(total, load(total) + load(column(j) + (kSums + k) * W));
      }
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

// What of the scales is learned: nothing, with scales that have no column factor; nothing; exactly e, l, m; any set of kinds, and n.
enum Train { kConstant, kFrozen, kUsual, kAny };
constexpr bool learns(Train train) { return train == kUsual || train == kAny; }

// row[i] * col[j] for a vector of j
template <typename T, Train train>
INLINE Vec<T> product(T row, const T* c, Column which) {
  return train == kConstant ? Vec<T>{} + row : load(c + which * kWidth<T>) * row;
}

template <typename T>
INLINE Vec<T> shift(const RowScales<T>& r, const T* c) {
  return exp_base2<T>(load(c + kN * kWidth<T>) * (r.n * T(-kLog2E)));
}

// weight = s*(e/beta)*N*X + (l/beta)*(a or raw)
template <typename T, bool congruent, Train train, bool has_n>
INLINE Vec<T> map(Vec<T> raw, const RowScales<T>& r, const T* c) {
  const Mask<T> sign = sign_bit<T>(raw);
  const Vec<T> a = flip<T>(raw, sign);
  const Vec<T> X = flip<T>(expm1_base2<T>(a * product<T, train>(r.bm, c, kM)), sign);
  Vec<T> be = product<T, train>(r.be, c, kE);
  if (has_n) be *= shift(r, c);
  return X * be + product<T, train>(r.bl, c, kL) * (congruent ? raw : a);
}

template <typename T>
struct Sums {
  Vec<T> e{}, l{}, m{}, n{};
};

// One vector of one row: d loss / d raw, and its share in the factors' gradients. c: its columns' patterns.
template <typename T, bool congruent, Train train, bool has_n>
INLINE Vec<T> pull(const Vec<T> g, const Vec<T> raw, const RowScales<T>& r, const T* c, int64_t learned, Sums<T>& row,
                   Sums<T>& col) {
  constexpr int W = kWidth<T>;
  const Mask<T> sign = sign_bit<T>(raw);
  const Vec<T> a = flip<T>(raw, sign);
  const Vec<T> X = expm1_base2<T>(a * product<T, train>(r.bm, c, kM));
  const Vec<T> signed_g = flip<T>(g, sign), path = congruent ? g : signed_g;
  Vec<T> t = g * X + g;  // g*(1 + X)*N
  Vec<T> U = signed_g * X;
  if (has_n) {
    const Vec<T> shrink = shift(r, c);
    t *= shrink, U *= shrink;
  }
  if (learns(train)) {
    // A number that is not finite would spread over its whole row and column. W is not finite where U or V is not.
    Vec<T> V = path * raw, W_ = t * raw;
    const auto finite = W_ - W_ == Vec<T>{};
    U = finite ? U : Vec<T>{}, V = finite ? V : Vec<T>{}, W_ = finite ? W_ : Vec<T>{};
    if (train == kUsual || (learned >> E & 1)) row.e += U * load(c + kE * W), col.e += U * r.e;
    if (train == kUsual || (learned >> L & 1)) row.l += V * load(c + kL * W), col.l += V * r.l;
    if (train == kUsual || (learned >> M & 1)) row.m += W_ * load(c + kEM * W), col.m += W_ * r.em;
    if (train == kAny && (learned >> N & 1)) row.n += U * load(c + kEN * W), col.n += U * r.en;
  }
  // s is 0 at 0: the slope there is the mean of the two one-sided ones
  const Vec<T> straight = congruent ? path : (raw != Vec<T>{} ? path : Vec<T>{});
  return t * product<T, train>(r.em, c, kEM) + straight * product<T, train>(r.bl, c, kL);
}

// Adam on one vector of raw.
template <typename T>
INLINE void update(const Vec<T> grad, const Slot<T>& s, const Adam<T>& adam) {
  const Vec<T> old = load(s.avg);
  // as torch's lerp; the other form keeps grad whole where beta1 is small
  const Vec<T> avg = adam.beta1 > T(0.5) ? old + (grad - old) * adam.one_minus_beta1
                                         : old * adam.beta1 + grad * adam.one_minus_beta1;
  Vec<T> sq = load(s.sq) * adam.beta2 + grad * (grad * adam.one_minus_beta2);
  store(s.avg, avg);
  store(s.sq, sq);
  if (s.max) {
    const Vec<T> max = load(s.max);
    sq = sq <= max ? max : sq;
    store(s.max, sq);
  }
  if (adam.writes)
    store(s.value, load(s.value) * adam.decay - avg / (square_root(sq) * adam.denominator + adam.eps));
}

// Adam on the four kinds of one entry of a factor.
template <typename T>
inline void factor_step(const Matrix<T>& x, const Slot<T>& s, const T* gradient) {
  using V4 = typename Simd<T>::V4;
  const Adam<T>& adam = x.adam;
  V4 g, value, avg, sq, rate;
  std::memcpy(&g, gradient, sizeof g);
  std::memcpy(&value, s.value, sizeof g);
  std::memcpy(&avg, s.avg, sizeof g);
  std::memcpy(&sq, s.sq, sizeof g);
  std::memcpy(&rate, adam.rates, sizeof g);
  avg = avg * adam.beta1 + g * adam.one_minus_beta1;
  sq = sq * adam.beta2 + g * (g * adam.one_minus_beta2);
  std::memcpy(s.avg, &avg, sizeof g);
  std::memcpy(s.sq, &sq, sizeof g);
  if (s.max) {
    V4 max;
    std::memcpy(&max, s.max, sizeof g);
    sq = sq <= max ? max : sq;
    std::memcpy(s.max, &sq, sizeof g);
  }
  if (!adam.writes) return;
  // a frozen kind has the rate 0, and 0/0 with eps = 0
  value = rate == V4{} ? value : value - rate * (avg / (square_root(sq) * adam.denominator + adam.eps));
  std::memcpy(s.value, &value, sizeof g);
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

// A row in strips, each taken through three short loops: in one long loop an iteration's chain of dependent operations fills the
// processor's window, which then overlaps too few of them.
template <typename T, bool congruent, Train train, bool has_n>
INLINE void pull_row(const Matrix<T>& x, const Hyper& h, int64_t i, Work<T>& work) {
  constexpr int W = kWidth<T>;
  constexpr int64_t kAhead = 8192 / sizeof(T);  // the processor's own prefetching stops at the end of a page
  const bool direct = x.weight_type == kOwn<T>;
  const Adam<T> adam = x.adam;
  const RowScales<T> scales = row_scales(x, i);
  const T* g = gradient(x, h, i, work);
  const Slot<T> s = x.raw.at(i * x.cols);
  T* weight = direct ? static_cast<T*>(x.weight) + i * x.cols : work.weight();
  T* grads = work.strip();
  Sums<T> row;
  const auto add = [&](T* c, const Sums<T>& sums) {
    if (!learns(train) || !x.has_col) return;
    T* now = c + kSums * W;
    store(now + E * W, load(now + E * W) + sums.e);
    store(now + L * W, load(now + L * W) + sums.l);
    store(now + M * W, load(now + M * W) + sums.m);
    if (train == kAny) store(now + N * W, load(now + N * W) + sums.n);
  };
  const int64_t whole = x.cols / W * W;
  for (int64_t start = 0; start < whole; start += kStrip * W) {
    const int64_t end = std::min(whole, start + kStrip * W);
    for (int64_t j = start; j < end; j += W) {
      __builtin_prefetch(g + j + kAhead, 0, 2);
      __builtin_prefetch(s.value + j + kAhead, 0, 2);
      Sums<T> col;
      T* c = work.column(j);
      store(grads + j - start,
            pull<T, congruent, train, has_n>(load(g + j), load(s.value + j), scales, c, h.learned, row, col));
      add(c, col);
    }
    for (int64_t j = start; j < end; j += W) {
      __builtin_prefetch(s.avg + j + kAhead, 0, 2);
      __builtin_prefetch(s.sq + j + kAhead, 0, 2);
      update(load(grads + j - start), s.at(j), adam);
    }
    if (!learns(train) && adam.writes)
      for (int64_t j = start; j < end; j += W)
        store(weight + j, map<T, congruent, train, has_n>(load(s.value + j), scales, work.column(j)));
  }
  if (whole < x.cols) {
    T* c = work.column(whole);
    const Edge<T> edge{work.edge(), x.cols - whole};
    Sums<T> col;
    const Slot<T> rest = s.at(whole);
    const Slot<T> copy{edge.take(0, rest.value), edge.take(1, rest.avg), edge.take(2, rest.sq),
                       rest.max ? edge.take(3, rest.max) : nullptr};
    const Vec<T> last = load(edge.take(4, g + whole));
    update(pull<T, congruent, train, has_n>(last, load(copy.value), scales, c, h.learned, row, col), copy, adam);
    add(c, col);
    edge.give(1, rest.avg), edge.give(2, rest.sq);
    if (rest.max) edge.give(3, rest.max);
    if (adam.writes) edge.give(0, rest.value);
    if (adam.writes && !learns(train)) {
      store(edge.memory + 5 * W, map<T, congruent, train, has_n>(load(copy.value), scales, c));
      edge.give(5, weight + whole);
    }
  }
  if (!learns(train) && !direct && adam.writes) write_row(weight, x.weight, x.weight_type, i * x.cols, x.cols);
  if (!learns(train) || !x.has_row) return;
  const T found[kKinds] = {horizontal_sum<T>(row.e) / x.beta, horizontal_sum<T>(row.l) / x.beta,
                           horizontal_sum<T>(row.m) * scales.e, -horizontal_sum<T>(row.n) * scales.be};
  if (x.one_row)
    for (int k = 0; k < kKinds; ++k) work.scalars[k] += found[k];
  else if (h.learned)
    factor_step(x, x.row.at(i * kKinds), found);
}

template <typename T, bool congruent, Train train, bool has_n>
INLINE void push_row(const Matrix<T>& x, int64_t i, Work<T>& work) {
  constexpr int W = kWidth<T>;
  const bool direct = x.weight_type == kOwn<T>;
  const RowScales<T> scales = row_scales(x, i);
  const T* raw = x.raw.value + i * x.cols;
  T* weight = direct ? static_cast<T*>(x.weight) + i * x.cols : work.weight();
  int64_t j = 0;
  for (; j + W <= x.cols; j += W) store(weight + j, map<T, congruent, train, has_n>(load(raw + j), scales, work.column(j)));
  if (j < x.cols) {
    const Edge<T> edge{work.edge(), x.cols - j};
    store(edge.memory + W, map<T, congruent, train, has_n>(load(edge.take(0, raw + j)), scales, work.column(j)));
    edge.give(1, weight + j);
  }
  if (!direct) write_row(weight, x.weight, x.weight_type, i * x.cols, x.cols);
}

// ---------------------------------------------------------------------------------------------------------- whole matrices

constexpr int64_t kChunk = 128;  // rows whose column sums are added up before they join the total: short chains round less

template <typename T, bool congruent, Train train, bool has_n>
void pull_rows(const Matrix<T>& x, const Hyper& h, int64_t from, int64_t to, Work<T>& work) {
  const bool sums = learns(train) && x.has_col;
  work.fill(x);
  std::fill(work.scalars, work.scalars + kKinds, T(0));
  if (sums) work.clear(kTotals, x.cols);
  for (int64_t first = from; first < to; first += kChunk) {
    const int64_t last = std::min(to, first + kChunk);
    if (sums) work.clear(kSums, x.cols);
    for (int64_t i = first; i < last; ++i) pull_row<T, congruent, train, has_n>(x, h, i, work);
    if (sums) work.add_sums_to_totals(x.cols);
  }
}

template <typename T, bool congruent, Train train, bool has_n>
void push_rows(const Matrix<T>& x, int64_t from, int64_t to, Work<T>& work) {
  work.fill(x);
  for (int64_t i = from; i < to; ++i) push_row<T, congruent, train, has_n>(x, i, work);
}

// Adam on what all rows have a share in: the column factors, and a row factor of one number. `works` in a fixed order.
template <typename T>
void finish_factors(const Matrix<T>& x, Work<T>* works, int64_t count) {
  if (x.has_col) {
    for (int64_t j = 0; j < x.cols; ++j) {
      T found[kKinds] = {0, 0, 0, 0};
      for (int64_t w = 0; w < count; ++w)
        for (int k = 0; k < kKinds; ++k) found[k] += works[w].entry(kTotals + k, j);
      const T e = works[0].entry(kE, j);
      found[E] /= x.beta, found[L] /= x.beta;
      found[M] *= e, found[N] *= -e / x.beta;
      factor_step(x, x.col.at(j * kKinds), found);
    }
  }
  if (x.has_row && x.one_row) {
    T found[kKinds] = {0, 0, 0, 0};
    for (int64_t w = 0; w < count; ++w)
      for (int k = 0; k < kKinds; ++k) found[k] += works[w].scalars[k];
    factor_step(x, x.row, found);
  }
}

template <typename T, bool congruent, Train train, bool has_n>
void step_matrix(const Matrix<T>& x, const Hyper& h, std::vector<Work<T>>& works, int64_t first, bool alone) {
  const int64_t count = alone ? 1 : std::min<int64_t>(works.size(), x.rows);
  const auto over_rows = [&](const auto& body) {
    if (count == 1) {
      body(int64_t(0), x.rows, works[first]);
      return;
    }
    at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t w = begin; w < end; ++w) body(x.rows * w / count, x.rows * (w + 1) / count, works[w]);
    });
  };
  over_rows([&](int64_t from, int64_t to, Work<T>& work) {
    pull_rows<T, congruent, train, has_n>(x, h, from, to, work);
  });
  if (!learns(train)) return;
  if (h.learned) finish_factors(x, &works[first], count);
  if (!x.adam.writes) return;
  over_rows([&](int64_t from, int64_t to, Work<T>& work) { push_rows<T, congruent, train, has_n>(x, from, to, work); });
}

template <typename T, bool congruent>
void step_by_kinds(const Matrix<T>& x, const Hyper& h, std::vector<Work<T>>& works, int64_t first, bool alone) {
  if (x.has_n)
    step_matrix<T, congruent, kAny, true>(x, h, works, first, alone);
  else if (h.learned == 0 && !x.has_col)
    step_matrix<T, congruent, kConstant, false>(x, h, works, first, alone);
  else if (h.learned == 0)
    step_matrix<T, congruent, kFrozen, false>(x, h, works, first, alone);
  else if (h.learned == (1 << E | 1 << L | 1 << M))
    step_matrix<T, congruent, kUsual, false>(x, h, works, first, alone);
  else
    step_matrix<T, congruent, kAny, false>(x, h, works, first, alone);
}

constexpr int64_t kAlone = 1 << 16;  // fewer elements than these are one thread's work

template <typename T>
void step_all(const std::vector<Matrix<T>>& matrices, const Hyper& h) {
  int64_t widest = 0, small = 0;
  for (const auto& x : matrices) {
    widest = std::max(widest, x.cols);
    small += x.rows * x.cols < kAlone ? x.rows * x.cols : 0;
  }
  std::vector<Work<T>> works(at::get_num_threads());
  for (auto& work : works) work.reserve(widest);
  const auto step = [&](const Matrix<T>& x, int64_t first, bool alone) {
    if (h.congruent)
      step_by_kinds<T, true>(x, h, works, first, alone);
    else
      step_by_kinds<T, false>(x, h, works, first, alone);
  };
  const int64_t threads = works.size();
  at::parallel_for(0, small < kAlone / 2 ? 1 : threads, 1, [&](int64_t begin, int64_t end) {
    const int64_t parts = small < kAlone / 2 ? 1 : threads;
    int64_t before = 0;
    for (const auto& x : matrices) {
      const int64_t size = x.rows * x.cols;
      if (size >= kAlone) continue;
      const int64_t owner = std::min(parts - 1, before * parts / std::max<int64_t>(1, small));
      if (owner >= begin && owner < end) step(x, owner, true);
      before += size;
    }
  });
  for (const auto& x : matrices)
    if (x.rows * x.cols >= kAlone) step(x, 0, false);
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

void step(at::TensorList weights, at::TensorList grads, at::TensorList state, at::IntArrayRef ints,
          at::ArrayRef<double> numbers, const at::Tensor& lr, double beta1, double beta2, double eps,
          double weight_decay, bool decoupled, bool amsgrad, bool maximize, bool congruent, int64_t learned,
          const std::optional<at::Tensor>& grad_scale) {
  TORCH_CHECK(weights.size() == grads.size() && ints.size() == weights.size() * kInts &&
                  numbers.size() == weights.size() * kNumbers,
              "seloptim: lists of different lengths");
  if (weights.empty()) return;
  const Hyper h{lr.item<double>(), beta1,    beta2,     eps,    weight_decay, grad_scale ? grad_scale->item<double>() : 1.0,
                decoupled,         maximize, congruent, learned};
  if (weights[0].scalar_type() == at::kDouble)
    step_of<double>(weights, grads, state, ints, numbers, h, amsgrad);
  else
    step_of<float>(weights, grads, state, ints, numbers, h, amsgrad);
}

}  // namespace

TORCH_LIBRARY(seloptim, m) {
  m.def(
      "step_(Tensor(a!)[] weights, Tensor[] grads, Tensor(b!)[] state, int[] ints, float[] numbers, Tensor lr, float beta1, "
      "float beta2, float eps, float weight_decay, bool decoupled, bool amsgrad, bool maximize, bool congruent, int learned, "
      "Tensor? grad_scale) -> ()");
}

TORCH_LIBRARY_IMPL(seloptim, CPU, m) { m.impl("step_", step); }

// The compound value that attention over a part of the keys amounts to, and its one merge.
//
// It is (max score, sum of exponentials, weighted V). The weighted V is spread over threads, so
// `combine` returns the factors by which each side's is multiplied before the two are added.
// It is associative and commutative, with the identity (-inf, 0, 0). Scores are in units of log2.
#pragma once

#include "problem_class.cuh"

namespace pagedattn {

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

PA_DEVICE float minus_infinity() { return __uint_as_float(0xff800000u); }
PA_DEVICE float not_a_number() { return __uint_as_float(0x7fffffffu); }

struct attention_partial {
  float max_score;
  float sum;  // of exp2(score - max_score)
};

PA_DEVICE attention_partial identity() { return {minus_infinity(), 0.0f}; }

/// What makes every merge that it enters NaN, by its sum: a maximum would pass over a NaN.
PA_DEVICE attention_partial poison() { return {0.0f, not_a_number()}; }

/// exp2(score - reference), where a reference of -inf stands for "no key yet".
PA_DEVICE float weight_of(float score, float reference) {
  return exp2f(score - (reference == minus_infinity() ? 0.0f : reference));  // -inf - -inf is NaN
}

struct combined {
  attention_partial state;
  float left, right;  // the factors of the two weighted Vs
};

PA_DEVICE combined combine(attention_partial a, attention_partial b) {
  const float top = fmaxf(a.max_score, b.max_score);
  const float left = weight_of(a.max_score, top), right = weight_of(b.max_score, top);
  return {{top, a.sum * left + b.sum * right}, left, right};
}

}  // namespace pagedattn

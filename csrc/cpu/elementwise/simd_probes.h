// Each function of simd.h that tests want to reach, over an array and at every width: "exp/8", "f16_store/16", ...
#pragma once

#include "elementwise/elementwise.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

template <int W>
void probe_exp(const void* in, void* out, int64_t n) {
    for (int64_t i = 0; i < n; i += W) store<W>((float*)out + i, exp<W>(load<W>((const float*)in + i)));
}

template <int W>
void probe_max(const void* in, void* out, int64_t n) {
    for (int64_t i = 0; i < n; i += W) ((float*)out)[i / W] = hmax<W>(load<W>((const float*)in + i));
}

template <int W>
void probe_sum(const void* in, void* out, int64_t n) {
    for (int64_t i = 0; i < n; i += W) ((float*)out)[i / W] = hsum<W>(load<W>((const float*)in + i));
}

template <class T, int W>
void probe_load(const void* in, void* out, int64_t n) {
    for (int64_t i = 0; i < n; i += W) store<W>((float*)out + i, load<W>((const T*)in + i));
}

template <class T, int W>
void probe_store(const void* in, void* out, int64_t n) {
    for (int64_t i = 0; i < n; i += W) store<W>((T*)out + i, load<W>((const float*)in + i));
}

#define OCTAVO_PROBES(name, ...)                                                                      \
    {name "/4", __VA_ARGS__ 4>}, {name "/8", __VA_ARGS__ 8>}, {                                       \
        name "/16", __VA_ARGS__ 16 >                                                                  \
    }

const SimdProbe kSimdProbes[] = {
    OCTAVO_PROBES("exp", probe_exp<),
    OCTAVO_PROBES("hmax", probe_max<),
    OCTAVO_PROBES("hsum", probe_sum<),
    OCTAVO_PROBES("bf16_load", probe_load<bf16, ),
    OCTAVO_PROBES("bf16_store", probe_store<bf16, ),
    OCTAVO_PROBES("f16_load", probe_load<f16, ),
    OCTAVO_PROBES("f16_store", probe_store<f16, ),
    OCTAVO_PROBES("int8_load", probe_load<int8_t, ),
    OCTAVO_PROBES("fp8_load", probe_load<fp8, ),
    OCTAVO_PROBES("fp8_store", probe_store<fp8, ),
};

#undef OCTAVO_PROBES

constexpr int kNumSimdProbes = int(sizeof kSimdProbes / sizeof kSimdProbes[0]);

}  // namespace
}  // namespace octavo::OCTAVO_ISA

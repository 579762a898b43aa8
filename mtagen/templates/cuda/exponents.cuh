#pragma once

constexpr float LOG2_E = 1.4426950408889634f;

constexpr float LN_2 = 0.6931471805599453f;

// A finite number below every score, so that exp2_fast(-inf - NO_PEAK) is 0.
constexpr float NO_PEAK = -1e30f;

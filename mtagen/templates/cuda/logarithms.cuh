#pragma once

constexpr float LOG2_E = 1.4426950408889634f;

constexpr float LN_2 = 0.6931471805599453f;

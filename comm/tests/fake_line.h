// The lines of fake_ibverbs.cc's devices: how long they take for a message, and what they carry.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int kDevices = 2;

using Clock = std::chrono::steady_clock;

// Rate of a device's line, Gb/s (AFD_FAKE_NIC_GBPS). 0: no limit.
double line_gbps() {
  static const char* const text = std::getenv("AFD_FAKE_NIC_GBPS");
  static const double gbps = text != nullptr ? std::atof(text) : 0;
  return gbps;
}

// Whether payloads are copied (not with AFD_FAKE_NIC_BYTES=0). A NIC does it by DMA at the rate of
// its line. Cores that copy what a GPU has just written are slower, and a copy between two GPUs
// takes its driver 14 to 20 us (H200).
bool carries_bytes() {
  static const char* const text = std::getenv("AFD_FAKE_NIC_BYTES");
  return text == nullptr || std::strcmp(text, "0") != 0;
}

// When the device's line will have carried these bytes, which were posted now. Under `world`.
Clock::time_point take_line(int index, uint64_t bytes) {
  static Clock::time_point free_at[kDevices];
  if (line_gbps() <= 0 || bytes == 0) return {};
  const auto ns = static_cast<int64_t>(static_cast<double>(bytes) * 8 / line_gbps());
  return free_at[index] = std::max(Clock::now(), free_at[index]) + std::chrono::nanoseconds(ns);
}

void wait_until(Clock::time_point done) {
  while (Clock::now() < done)
    if (done - Clock::now() > std::chrono::microseconds(200)) usleep(100);
}

}  // namespace

#include "trace_clock.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "afd_comm/process.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <x86intrin.h>
#endif

namespace afd_comm {

#if defined(__x86_64__)
namespace {

// Interval between two comparisons with the clock. A calibrated rate is wrong by less than 1e-6, so
// this adds a nanosecond.
constexpr uint64_t kCompareNs = 1000000;
// The rate is measured over at least this time, then measured again.
constexpr uint64_t kCalibrateNs = 50000000;
constexpr uint64_t kRecalibrateNs = 1000000000;
// The error of a pair of readings is half the time it took. Use the first good one of a few tries,
// else the best, unless all were interrupted.
constexpr int kTries = 3;
constexpr uint64_t kGoodTicks = 300;
constexpr uint64_t kWorstTicks = 2000;
constexpr int kShift = 32;  // of the fixed point rate

// Whether the kernel trusts the counter to run at a constant rate, in step on all cores.
bool counter_is_the_clock() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned power_leaf = 0x80000007, invariant = 1u << 8;
  if (__get_cpuid(power_leaf, &a, &b, &c, &d) == 0 || (d & invariant) == 0) return false;
  const Fd fd(open("/sys/devices/system/clocksource/clocksource0/current_clocksource",
                   O_RDONLY | O_CLOEXEC));
  char text[16] = {};
  return fd && read(fd.get(), text, sizeof text - 1) > 0 && std::strcmp(text, "tsc\n") == 0;
}

struct Pair {
  uint64_t ticks = 0;
  uint64_t ns = 0;
};

// One thread's calibration of the counter. Threads share nothing, so none waits for another.
struct Counter {
  Pair compared;       // the last comparison
  Pair calibrated;     // start of the next rate measurement
  uint64_t rate = 0;   // ns per tick; 0: not known yet
  uint64_t valid = 0;  // ticks after `compared` for which the rate may be used
  uint64_t last = 0;   // the last result
};

// Returns false if the two could not be read close to each other.
bool compare(Counter& counter) {
  Pair now;
  uint64_t best = kWorstTicks;
  for (int tries = 0; tries < kTries && best > kGoodTicks; ++tries) {
    const uint64_t before = __rdtsc();
    const uint64_t ns = now_ns();
    const uint64_t took = __rdtsc() - before;
    if (took >= best) continue;
    best = took;
    now = {before + took / 2, ns};
  }
  if (now.ticks == 0) return false;
  if (counter.calibrated.ticks == 0) counter.calibrated = now;
  const uint64_t span = now.ns - counter.calibrated.ns;
  if (span > (counter.rate == 0 ? kCalibrateNs : kRecalibrateNs)) {
    const auto ratio =
        static_cast<double>(span) / static_cast<double>(now.ticks - counter.calibrated.ticks);
    counter.rate = static_cast<uint64_t>(ratio * static_cast<double>(uint64_t{1} << kShift));
    counter.valid = static_cast<uint64_t>(static_cast<double>(kCompareNs) / ratio);
    counter.calibrated = now;
  }
  counter.compared = now;
  return true;
}

}  // namespace

uint64_t trace_now_ns() {
  static const bool usable = counter_is_the_clock();
  if (!usable) return now_ns();
  __attribute__((tls_model("initial-exec"))) thread_local Counter counter;
  if (counter.rate == 0) {
    const uint64_t ns = now_ns();
    if (counter.calibrated.ticks == 0 || ns - counter.calibrated.ns > kCalibrateNs)
      compare(counter);
    return counter.last = std::max(counter.last, ns);
  }
  uint64_t since = __rdtsc() - counter.compared.ticks;
  if (since >= counter.valid) {
    if (!compare(counter)) return counter.last = std::max(counter.last, now_ns());
    since = __rdtsc() - counter.compared.ticks;
  }
  const uint64_t ns = counter.compared.ns + (since * counter.rate >> kShift);
  return counter.last = std::max(counter.last, ns);
}
#else
uint64_t trace_now_ns() { return now_ns(); }
#endif

}  // namespace afd_comm

// Waiting for doorbells: a brief spin, then sleep in the kernel.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "afd_comm/region.h"
#include "packed_times.h"
#include "trace_clock.h"

namespace afd_comm {
namespace {

// Longest sleep. Bounds the time until Ctrl-C or a dead writer is noticed if nothing arrives.
constexpr uint64_t kSliceNs = 50000000;
// During the kernel checks of the writers no doorbell is seen, so short waits skip them.
constexpr uint64_t kFirstLookNs = 1000000;
// A GPU that rings a doorbell cannot wake a thread, so sleeps are this short if GPUs may ring.
constexpr uint64_t kSilentNs = 20000;
constexpr int kSpinsPerClockRead = 32;
// A wait keeps polling for this long in total, yielding the core between two looks. Sleeping and
// waking up takes 25 us on a virtual machine, and 1 in 20 wake-ups takes up to a timer tick.
constexpr uint64_t kYieldNs = 50000;
// If a yield took longer than this, another thread ran. A sleeping thread may preempt others when
// its message arrives, but a yielding thread waits for the end of their time slice. So after a long
// yield no wait yields for this many times its duration.
constexpr uint64_t kCrowdedNs = 20000;
constexpr uint64_t kCrowdedFactor = 16;

class Sleeper {
 public:
  explicit Sleeper(std::atomic<uint32_t>& count) : count_(count) {
    count_.fetch_add(1, std::memory_order_seq_cst);
  }
  ~Sleeper() { count_.fetch_sub(1, std::memory_order_relaxed); }
  Sleeper(const Sleeper&) = delete;

 private:
  std::atomic<uint32_t>& count_;
};

// Returns a receiver to its own thread.
struct Serving {
  Receiver* receiver = nullptr;
  Serving() = default;
  Serving(const Serving&) = delete;
  ~Serving() { end(); }
  void end() {
    if (receiver != nullptr) std::exchange(receiver, nullptr)->end_serving();
  }
};

}  // namespace

bool Region::poll(Awaited* awaited, std::size_t count, WaitFor mode) {
  std::size_t open = 0;
  bool any = false;
  for (std::size_t i = 0; i < count; ++i) {
    Awaited& a = awaited[i];
    if (a.status != Status::Ok && ready(a.slot, a.flag)) {
      a.status = Status::Ok;
      PeerTrace* const trace = slot_traces_[a.slot].trace.load(std::memory_order_acquire);
      if (trace != nullptr) note(a.slot, a.flag, *trace);
    }
    if (a.status == Status::Deadline) ++open;
    if (a.status == Status::Ok) any = true;
  }
  return open == 0 || (mode == WaitFor::Any && any);
}

void Region::note(uint32_t slot, uint64_t flag, PeerTrace& trace) {
  const SlotControl& control = memory_.control(slot);
  if (control.header.traced == kNotTraced) return;
  // Prefetch the line while the clock is read.
  if (control.header.traced == kTimesInLine) __builtin_prefetch(&control.times);
  SlotTrace& noted = slot_traces_[slot];
  if (noted.seen.exchange(flag, std::memory_order_relaxed) == flag) return;
  const auto consumed = static_cast<int64_t>(trace_now_ns());
  noted.consumed.store(consumed, std::memory_order_relaxed);
  Times times = read_times(control, clock_identity());
  times.consumed = consumed;
  trace.note(control.header, times);
}

void Region::absorb(const Awaited* awaited, std::size_t count) const {
  for (std::size_t i = 0; i < count; ++i) {
    PeerTrace* const trace = slot_traces_[awaited[i].slot].trace.load(std::memory_order_acquire);
    if (trace != nullptr) trace->absorb();
  }
}

Receiver* Region::begin_serving(const Awaited* awaited, std::size_t count) const {
  // A forked child shares its parent's sockets and must not read from them.
  if (receivers_.empty() || getpid() != creator_) return nullptr;
  for (std::size_t i = 0; i < count; ++i) {
    if (awaited[i].status != Status::Deadline) continue;
    const Claim& claim = memory_.claim(awaited[i].slot);
    // A writer on this host rings without notifying the receiver.
    if (claim.serial.load(std::memory_order_acquire) == 0 ||
        claim.owner.load(std::memory_order_relaxed) != 0)
      return nullptr;
  }
  for (const auto& receiver : receivers_)
    if (receiver->begin_serving()) return receiver.get();
  return nullptr;
}

bool Region::mark_gone(Awaited* awaited, std::size_t count, WaitFor mode, bool ask_kernel) {
  for (std::size_t i = 0; i < count; ++i) {
    Awaited& a = awaited[i];
    if (a.status != Status::Deadline) continue;
    if (!(ask_kernel ? watch_.look(memory_, a.slot) : WriterWatch::gone(memory_, a.slot))) continue;
    a.status = Status::PeerGone;
  }
  // Look again: a writer may have rung before it died.
  return poll(awaited, count, mode);
}

bool Region::wait(Awaited* awaited, std::size_t count, WaitFor mode, uint64_t deadline,
                  Interrupt interrupt) {
  if (poll(awaited, count, mode)) return false;
  // Count the messages noted earlier, while there is time.
  if (traced_.load(std::memory_order_relaxed)) absorb(awaited, count);
  const uint32_t wakes = wakes_.load(std::memory_order_acquire);
  const uint64_t spin_ns = static_cast<uint64_t>(spin_ns_.load(std::memory_order_relaxed));
  std::atomic<uint32_t>& arrivals = memory_.head().arrivals;
  uint64_t now = now_ns();
  uint64_t next_look = now + kFirstLookNs;
  Serving serving;
  while (true) {
    if (serving.receiver == nullptr) serving.receiver = begin_serving(awaited, count);
    const uint64_t spin_end = std::min(now + spin_ns, deadline);
    const bool may_yield = spin_ns != 0 && now >= crowded_until_.load(std::memory_order_relaxed);
    uint64_t yield_end = may_yield ? std::min(now + kYieldNs, deadline) : 0;
    // The serving thread rings the doorbells itself, so there is nothing to look for in between.
    const int looks = spin_ns == 0 || serving.receiver != nullptr ? 1 : kSpinsPerClockRead;
    do {
      if (serving.receiver != nullptr) serving.receiver->serve(0, 0);
      for (int i = 0; i < looks; ++i) {
        if (poll(awaited, count, mode)) return false;
        relax();
      }
      now = now_ns();
      if (now < spin_end || now >= yield_end) continue;
      sched_yield();
      const uint64_t back = now_ns();
      if (back - now > kCrowdedNs) {
        crowded_until_.store(back + kCrowdedFactor * (back - now), std::memory_order_relaxed);
        yield_end = 0;
      }
      now = back;
    } while (now < std::max(spin_end, yield_end));

    bool signal = false;
    {
      const Sleeper sleeper(memory_.head().sleepers);
      const uint32_t seen = arrivals.load(std::memory_order_seq_cst);
      if (mark_gone(awaited, count, mode, now >= next_look)) return false;
      if (now >= next_look) next_look = now + kSliceNs;
      // Not closed(), which becomes true before the connections have ended.
      if (memory_.head().closed.load(std::memory_order_acquire) != 0) {
        for (std::size_t i = 0; i < count; ++i)
          if (awaited[i].status == Status::Deadline) awaited[i].status = Status::Closed;
        return false;
      }
      if (now >= deadline || wakes_.load(std::memory_order_acquire) != wakes) return false;
      uint64_t until = std::min(deadline, next_look);
      if (memory_.head().silent.load(std::memory_order_relaxed) != 0)
        until = std::min(until, now + kSilentNs);
      signal = serving.receiver != nullptr ? serving.receiver->serve(seen, until - now)
                                           : memory_.sleep(seen, until - now);
    }
    now = now_ns();
    if (interrupt == nullptr || (!signal && now < next_look)) continue;
    serving.end();  // the interrupt may have to wait for the GIL
    if (interrupt()) return true;
  }
}

}  // namespace afd_comm

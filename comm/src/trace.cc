#include "afd_comm/trace.h"

#include <cstring>

#include "afd_comm/process.h"

namespace afd_comm {
namespace {

// Times come from the wire, so arithmetic on them must be defined for any bits.
int64_t minus(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
}
int64_t plus(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}

int64_t error_of(int64_t round_trip, int64_t age) {
  return round_trip / 2 + static_cast<int64_t>(kDrift * static_cast<double>(age < 0 ? 0 : age));
}

}  // namespace

std::size_t Histogram::bucket_of(uint64_t ns) {
  constexpr uint64_t sub = uint64_t{1} << kSubBits;
  if (ns < sub) return static_cast<std::size_t>(ns);
  const int top = 63 - __builtin_clzll(ns);
  if (top > kTopBit) return kBuckets - 1;
  return (static_cast<std::size_t>(top - kSubBits + 1) << kSubBits) +
         static_cast<std::size_t>((ns >> (top - kSubBits)) & (sub - 1));
}

uint64_t Histogram::upper_bound(std::size_t bucket) {
  constexpr std::size_t sub = std::size_t{1} << kSubBits;
  if (bucket < sub) return bucket + 1;
  const int shift = static_cast<int>(bucket >> kSubBits) - 1;
  return (uint64_t{sub + (bucket & (sub - 1))} + 1) << shift;
}

void Histogram::record(int64_t ns) {
  const uint64_t value = ns < 0 ? 0 : static_cast<uint64_t>(ns);
  counts_[bucket_of(value)].fetch_add(1, std::memory_order_relaxed);
  total_.fetch_add(value, std::memory_order_relaxed);
  uint64_t known = max_.load(std::memory_order_relaxed);
  while (value > known && !max_.compare_exchange_weak(known, value, std::memory_order_relaxed)) {
  }
}

Histogram::Counts Histogram::counts() const {
  Counts out;
  for (std::size_t i = 0; i < kBuckets; ++i) out[i] = counts_[i].load(std::memory_order_relaxed);
  return out;
}

void OffsetFilter::add(int64_t round_trip, int64_t offset, int64_t at) {
  if (busy_.test_and_set(std::memory_order_acquire)) return;
  const int64_t known = round_trip_.load(std::memory_order_relaxed);
  const int64_t age = minus(at, at_.load(std::memory_order_relaxed));
  if (known < 0 || error_of(round_trip, 0) <= error_of(known, age)) {
    offset_.store(offset, std::memory_order_relaxed);
    round_trip_.store(round_trip, std::memory_order_relaxed);
    at_.store(at, std::memory_order_relaxed);
  }
  busy_.clear(std::memory_order_release);
}

Offset OffsetFilter::now(int64_t at) const {
  const int64_t round_trip = round_trip_.load(std::memory_order_relaxed);
  if (round_trip < 0) return {};
  return {offset_.load(std::memory_order_relaxed),
          error_of(round_trip, minus(at, at_.load(std::memory_order_relaxed)))};
}

void EventRing::add(const TraceEvent& event) {
  int64_t words[kWords];
  std::memcpy(words, &event, sizeof event);
  const uint64_t number = next_.fetch_add(1, std::memory_order_relaxed);
  Entry& entry = entries_[number % kEvents];
  entry.number.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  for (std::size_t i = 0; i < kWords; ++i)
    entry.words[i].store(words[i], std::memory_order_relaxed);
  entry.number.store(number + 1, std::memory_order_release);
}

std::vector<TraceEvent> EventRing::events() const {
  std::vector<TraceEvent> out;
  const uint64_t end = next_.load(std::memory_order_acquire);
  for (uint64_t number = end < kEvents ? 0 : end - kEvents; number < end; ++number) {
    const Entry& entry = entries_[number % kEvents];
    if (entry.number.load(std::memory_order_acquire) != number + 1) continue;
    int64_t words[kWords];
    for (std::size_t i = 0; i < kWords; ++i)
      words[i] = entry.words[i].load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (entry.number.load(std::memory_order_relaxed) != number + 1) continue;
    std::memcpy(&out.emplace_back(), words, sizeof words);
  }
  return out;
}

void PeerTrace::note(const Header& h, const Times& times) {
  const Noted message{times, h.user, h.count, h.nbytes};
  if (aside_.push(message)) return;
  // The queue is full: count the oldest message to make room.
  Noted oldest;
  if (aside_.pop(oldest)) count(oldest);
  if (!aside_.push(message)) count(message);
}

void PeerTrace::absorb_all() {
  for (Noted message; aside_.pop(message);) count(message);
}

void PeerTrace::count(const Noted& m) {
  const Times& t = m.times;
  record(Path::Waiting, minus(t.consumed, t.arrived));
  const bool same_clock = t.clock == clock_identity();
  same_clock_.store(same_clock, std::memory_order_relaxed);
  const int64_t back = minus(t.arrived, t.posted);
  bool answers = t.echo_posted != 0;
  int64_t there = 0;
  if (answers) {
    there = minus(t.echo_arrived, t.echo_posted);
    const int64_t round_trip = plus(there, back);
    const int64_t held = minus(t.posted, t.echo_arrived);
    answers = round_trip >= 0 && held >= 0 && (same_clock || held <= kMaxHoldNs);
    if (answers) {
      record(Path::RoundTrip, round_trip);
      if (!same_clock) filter_.add(round_trip, minus(there, back) / 2, t.arrived);
    }
  }
  const Offset offset = same_clock ? Offset{0, 0} : filter_.now(t.arrived);
  if (offset.error_ns < 0) return;
  record(Path::Inbound, plus(back, offset.ns));
  if (answers) record(Path::Outbound, minus(there, offset.ns));
  ring_.add({minus(t.posted, offset.ns), minus(t.sent, offset.ns), t.arrived, t.consumed, m.user,
             int64_t{m.count}, m.nbytes});
}

std::vector<TraceEvent> PeerTrace::events() {
  absorb();
  return ring_.events();
}

const Histogram& PeerTrace::histogram(Path path) {
  absorb();
  return paths_[static_cast<std::size_t>(path)];
}

Offset PeerTrace::offset() {
  absorb();
  if (same_clock_.load(std::memory_order_relaxed)) return {0, 0};
  return filter_.now(static_cast<int64_t>(now_ns()));
}

}  // namespace afd_comm

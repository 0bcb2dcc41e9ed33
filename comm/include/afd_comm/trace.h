// Trace: measures where a peer's messages spend their time, without synchronised clocks.
//
// A message carries Times. An answer also echoes two times of the message it answers. So the asking
// side knows four times, as in NTP (RFC 5905, section 8):
//
//   t0 asked (here)   t1 arrived (there)   t2 answered (there)   t3 arrived (here)
//   round trip on the wire = (t3 - t0) - (t2 - t1)             differences of one clock each
//   offset there - here    = ((t1 - t0) - (t3 - t2)) / 2       wrong by at most round trip / 2
//
// The offset of the fastest recent round trip turns t1 - t0 and t3 - t2 into one-way times; kDrift
// limits the age of a sample. Processes that share a clock (see clock_identity) need no estimate:
// their offset is 0 and their one-way times are exact.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "afd_comm/bounded_queue.h"
#include "afd_comm/types.h"

namespace afd_comm {

// Largest drift between two quartz clocks: 100 parts per million.
constexpr double kDrift = 1e-4;
// Answers that were held longer are not used: drift alone could add 10 us.
constexpr int64_t kMaxHoldNs = 100000000;

// Counts times in ns, in buckets at most 1/16 of their value wide. Never blocks; any number of
// threads may record.
class Histogram {
 public:
  static constexpr int kSubBits = 4;
  static constexpr int kTopBit = 36;  // longer times (69 s) count in the last bucket
  static constexpr std::size_t kBuckets = ((kTopBit - kSubBits + 2) << kSubBits);
  using Counts = std::array<uint64_t, kBuckets>;

  static std::size_t bucket_of(uint64_t ns);
  // The smallest value above the bucket, ns.
  static uint64_t upper_bound(std::size_t bucket);

  // A negative time, from the error of an estimated offset, counts as 0.
  void record(int64_t ns);
  Counts counts() const;
  uint64_t total_ns() const { return total_.load(std::memory_order_relaxed); }
  uint64_t max_ns() const { return max_.load(std::memory_order_relaxed); }

 private:
  std::array<std::atomic<uint64_t>, kBuckets> counts_{};
  std::atomic<uint64_t> total_{0};
  std::atomic<uint64_t> max_{0};
};

// By how much the peer's clock is ahead of ours.
struct Offset {
  int64_t ns = 0;
  int64_t error_ns = -1;  // |ns - truth| is at most this when it was taken; -1: not known yet
};

// Keeps the sample with the smallest error bound; the bound grows with the sample's age.
class OffsetFilter {
 public:
  // `at`: our clock, ns. Drops the sample if another thread is adding one.
  void add(int64_t round_trip, int64_t offset, int64_t at);
  Offset now(int64_t at) const;

 private:
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
  std::atomic<int64_t> offset_{0};
  std::atomic<int64_t> round_trip_{-1};
  std::atomic<int64_t> at_{0};
};

enum class Path : int {
  Inbound = 0,    // peer's post to arrival here
  Outbound = 1,   // our post to arrival there, learned from the answer
  RoundTrip = 2,  // both of them, without the time the peer held the message
  Waiting = 3,    // from arrival here until a wait saw it
};
constexpr std::size_t kPaths = 4;

// One message for a dump: times in ns of our clock, the peer's times converted.
struct TraceEvent {
  int64_t posted, sent, arrived, consumed;
  std::array<uint64_t, kUserWords> user;
  int64_t count, nbytes;
};

// The last messages of one peer. Never blocks; a reader skips entries that are being overwritten.
class EventRing {
 public:
  static constexpr std::size_t kEvents = 4096;
  void add(const TraceEvent& event);
  // Oldest first.
  std::vector<TraceEvent> events() const;

 private:
  static constexpr std::size_t kWords = sizeof(TraceEvent) / sizeof(int64_t);
  struct Entry {
    std::atomic<uint64_t> number{0};  // 0: being written, or never
    std::array<std::atomic<int64_t>, kWords> words{};
  };
  std::atomic<uint64_t> next_{0};
  std::array<Entry, kEvents> entries_{};
};

// Everything recorded about one peer's messages. Any thread may call any function; none waits for
// another.
class PeerTrace {
 public:
  // Records that a wait saw a message with these times, which may be false. This only queues the
  // message. absorb() counts it later, when a wait has time until the next message.
  void note(const Header& header, const Times& times);
  // Counts the queued messages.
  void absorb() {
    if (!aside_.empty()) absorb_all();
  }
  // Events of all messages noted so far.
  std::vector<TraceEvent> events();
  const Histogram& histogram(Path path);
  Offset offset();

 private:
  // The part of a message that is counted.
  struct Noted {
    Times times;
    std::array<uint64_t, kUserWords> user;
    uint32_t count;
    int64_t nbytes;
  };
  static constexpr std::size_t kAside = 64;
  void absorb_all();
  void count(const Noted& message);
  void record(Path path, int64_t ns) { paths_[static_cast<std::size_t>(path)].record(ns); }
  BoundedQueue<Noted, kAside> aside_;
  std::array<Histogram, kPaths> paths_;
  OffsetFilter filter_;
  EventRing ring_;
  std::atomic<bool> same_clock_{false};
};

}  // namespace afd_comm

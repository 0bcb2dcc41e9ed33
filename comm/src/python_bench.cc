// Python binding of the benchmark loops: round trips between two processes without Python in them.
#include <nanobind/ndarray.h>

#include <atomic>
#include <cstring>
#include <string>

#include "afd_comm/link.h"
#include "python.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace afd_comm {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Memory = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Nanoseconds = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr int64_t kTimeoutUs = 10000000;

[[noreturn]] void fail(const char* what, std::size_t round, Status status) {
  throw CommError(std::string(what) + " of round " + std::to_string(round) + " ended with status " +
                  std::to_string(static_cast<int>(status)) +
                  "; is the other process still running?");
}

void ping_pong(Region& region, Link& link, Bytes data, uint32_t generation, bool starts,
               Nanoseconds times) {
  Message message;
  message.header.nbytes = static_cast<int64_t>(data.shape(0));
  message.parts[0] = Part{0, data.data(), data.shape(0)};
  message.part_count = 1;
  const auto post = [&](std::size_t round) {
    message.flag = make_flag(generation, static_cast<uint32_t>(round + 1));
    const Status status = link.post(message);
    if (status != Status::Ok) fail("the post", round, status);
  };
  const auto wait = [&](std::size_t round) {
    Awaited awaited{0, make_flag(generation, static_cast<uint32_t>(round + 1))};
    region.wait(&awaited, 1, WaitFor::All, deadline_after_us(kTimeoutUs), nullptr);
    if (awaited.status != Status::Ok) fail("the wait", round, awaited.status);
    // The next round's request, or this round's answer.
    const Times seen = region.times(0);
    message.echo = Echo{seen.posted, seen.arrived};
  };
  const nb::gil_scoped_release release;
  for (std::size_t round = 0; round < times.shape(0); ++round) {
    const uint64_t start = now_ns();
    if (starts) post(round);
    wait(round);
    times(round) = static_cast<int64_t>(now_ns() - start);
    if (!starts) post(round);
  }
}

// Shared memory of two lines (a flag for each side) and two buffers of `half` bytes.
void memcpy_ping_pong(Memory shared, Bytes data, bool starts, Nanoseconds times) {
  constexpr std::size_t flags = 4096;
  const std::size_t half = (shared.shape(0) - flags) / 2;
  if (shared.shape(0) < flags || data.shape(0) > half)
    throw nb::value_error("shared is too small for two buffers of the size of data");
  uint8_t* const base = shared.data();
  auto& mine = *reinterpret_cast<std::atomic<uint64_t>*>(base + (starts ? 0 : 64));
  auto& theirs = *reinterpret_cast<std::atomic<uint64_t>*>(base + (starts ? 64 : 0));
  uint8_t* const to = base + flags + (starts ? half : 0);
  const auto post = [&](std::size_t round) {
    std::memcpy(to, data.data(), data.shape(0));
    theirs.store(round + 1, std::memory_order_release);
  };
  const auto wait = [&](std::size_t round) {
    for (uint64_t spins = 1; mine.load(std::memory_order_acquire) != round + 1; ++spins) {
      relax();
      // Do not spin forever if the peer is dead; this is at least ten seconds.
      if (spins == uint64_t{1} << 30) fail("the wait", round, Status::Deadline);
    }
  };
  const nb::gil_scoped_release release;
  for (std::size_t round = 0; round < times.shape(0); ++round) {
    const uint64_t start = now_ns();
    if (starts) post(round);
    wait(round);
    times(round) = static_cast<int64_t>(now_ns() - start);
    if (!starts) post(round);
  }
}

}  // namespace

void bind_bench(nb::module_& m) {
  m.def("ping_pong", &ping_pong, "region"_a, "link"_a, "data"_a, "generation"_a, "starts"_a,
        "times"_a);
  m.def("memcpy_ping_pong", &memcpy_ping_pong, "shared"_a, "data"_a, "starts"_a, "times"_a);
}

}  // namespace afd_comm

#include "verbs_plan.h"

#include <algorithm>

#include "stage_buffer.h"

namespace afd_comm {
namespace {

uint32_t next_alive(uint32_t alive, uint32_t from) {
  uint32_t qp = from % kMaxStripes;
  while (!(alive >> qp & 1)) qp = (qp + 1) % kMaxStripes;
  return qp;
}

StripePlan cut(uint64_t nbytes, uint64_t length, uint32_t alive, uint32_t turn) {
  StripePlan plan;
  uint32_t qp = next_alive(alive, turn);
  uint64_t begin = 0;
  do {
    const uint64_t end = std::min(begin + length, nbytes);
    plan.stripes[plan.count++] = Stripe{qp, begin, end};
    begin = end;
    qp = next_alive(alive, qp + 1);
  } while (begin < nbytes);
  return plan;
}

}  // namespace

// With the number of stripes of a plan instead of the wanted number, the result is the same: a plan
// of length L has ceil(nbytes / L) stripes.
uint64_t stripe_length(uint64_t nbytes, uint32_t count, uint64_t unit) {
  const uint64_t even = (nbytes + count - 1) / count;
  return (even + unit - 1) / unit * unit;
}

StripePlan plan_stripes(uint64_t nbytes, uint32_t alive, uint32_t turn, uint64_t least) {
  const auto usable = static_cast<uint64_t>(__builtin_popcount(alive));
  const uint64_t wanted = std::clamp<uint64_t>(nbytes / std::max<uint64_t>(least, 1), 1, usable);
  return cut(nbytes, stripe_length(nbytes, static_cast<uint32_t>(wanted)), alive, turn);
}

StripePlan plan_staged(uint64_t nbytes, uint32_t alive, uint32_t turn) {
  const uint64_t wanted =
      std::clamp<uint64_t>((nbytes + kStageChunk - 1) / kStageChunk, 1, kMaxStripes);
  return cut(nbytes, stripe_length(nbytes, static_cast<uint32_t>(wanted), kStageChunk), alive,
             turn);
}

std::size_t cut_stripe(const Part* parts, std::size_t part_count, const Stripe& stripe,
                       uint64_t most, Piece* out) {
  std::size_t count = 0;
  uint64_t start = 0;  // of the part, in the message
  for (std::size_t i = 0; i < part_count; ++i) {
    const uint64_t end = start + parts[i].nbytes;
    uint64_t at = std::max(start, stripe.begin);
    const uint64_t stop = std::min(end, stripe.end);
    while (at < stop && count < kMaxPieces) {
      const uint64_t n = std::min(most, stop - at);
      out[count++] = Piece{i, at - start, parts[i].offset + (at - start), n};
      at += n;
    }
    start = end;
  }
  return count;
}

uint64_t with_arrival(uint64_t before, uint8_t tag, uint8_t stripe) {
  const auto ahead = static_cast<int8_t>(tag - tag_of(before));
  if (ahead < 0) return before;
  const uint32_t known = ahead == 0 ? stripes_of(before) : 0;
  return arrivals_of(tag, known | 1u << (stripe % 32));
}

}  // namespace afd_comm

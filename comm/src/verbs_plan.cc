#include "verbs_plan.h"

#include <algorithm>

namespace afd_comm {
namespace {

constexpr uint64_t kLineBytes = 64;

uint32_t next_alive(uint32_t alive, uint32_t from) {
  uint32_t qp = from % kMaxStripes;
  while (!(alive >> qp & 1)) qp = (qp + 1) % kMaxStripes;
  return qp;
}

}  // namespace

StripePlan plan_stripes(uint64_t nbytes, uint32_t alive, uint32_t turn, uint64_t least) {
  const auto usable = static_cast<uint64_t>(__builtin_popcount(alive));
  const uint64_t wanted = std::clamp<uint64_t>(nbytes / std::max<uint64_t>(least, 1), 1, usable);
  const uint64_t even = (nbytes + wanted - 1) / wanted;
  const uint64_t length = (even + kLineBytes - 1) / kLineBytes * kLineBytes;
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

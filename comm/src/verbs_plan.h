// Backend verbs: how a message is divided into stripes, and the contents of its immediates. Pure.
#pragma once

#include <cstdint>

#include "afd_comm/types.h"
#include "afd_comm/verbs.h"

namespace afd_comm {

constexpr uint32_t kMaxStripes = kMaxVerbsQps;
constexpr uint64_t kLineBytes = 64;
// Work requests of one stripe: its pieces and the immediate.
constexpr std::size_t kMaxPieces = 47;

// Bytes [begin, end) of the message's parts laid end to end, over one QP.
struct Stripe {
  uint32_t qp = 0;
  uint64_t begin = 0;
  uint64_t end = 0;
};

// stripes[0] leads: the record with header and flag follows it.
struct StripePlan {
  Stripe stripes[kMaxStripes];
  uint32_t count = 0;
};

// Bytes of each stripe but the last of a message of `nbytes` in `count` stripes: whole cache lines.
// A receiver that knows the number of stripes of a plan thereby knows where each begins.
uint64_t stripe_length(uint64_t nbytes, uint32_t count, uint64_t unit = kLineBytes);

// Returns nearly equal stripes of whole cache lines over the QPs in the bit set `alive` (not
// empty). No stripe is smaller than `least` bytes unless it is the only one. `turn` spreads small
// messages over the QPs.
StripePlan plan_stripes(uint64_t nbytes, uint32_t alive, uint32_t turn, uint64_t least);

// The same for a message that is copied through host memory: stripes of kStageChunk bytes, or
// multiples of it if they would be too many, in turn over the QPs. A QP may get several: while one
// stripe is on the wire, the next is copied from the device and the last to the device.
StripePlan plan_staged(uint64_t nbytes, uint32_t alive, uint32_t turn);

// One contiguous piece of a stripe: `nbytes` at `from` in part `part` go to `offset` in the slot.
struct Piece {
  std::size_t part = 0;
  uint64_t from = 0;
  uint64_t offset = 0;
  uint64_t nbytes = 0;
};

// Cuts a stripe at part boundaries and every `most` bytes. Returns the number of pieces; at most
// kMaxPieces, for which slot_bytes / most + kMaxParts < kMaxPieces suffices.
std::size_t cut_stripe(const Part* parts, std::size_t part_count, const Stripe& stripe,
                       uint64_t most, Piece* out);

// The contents of a 32-bit immediate: stripe `stripe` of message number `tag` (mod 256) of a slot.
// Slots count from the link's first. The receiver keeps a bit per stripe, so that a stripe sent
// again after a failure counts once.
struct Immediate {
  uint32_t slot = 0;  // below kMaxImmediateSlots
  uint8_t tag = 0;
  uint8_t stripe = 0;
};
constexpr uint32_t kMaxImmediateSlots = 1 << 16;
constexpr uint8_t kProbeStripe = 0xff;  // the test packet of a new connection

constexpr uint32_t encode(Immediate i) { return i.slot << 16 | uint32_t{i.tag} << 8 | i.stripe; }
constexpr Immediate decode(uint32_t bits) {
  return {bits >> 16, static_cast<uint8_t>(bits >> 8), static_cast<uint8_t>(bits)};
}

// How many messages of a link may wait at the receiver for an earlier one: half of them
// unacknowledged, half not yet processed by a progress thread.
constexpr uint32_t kOrderWindow = 4096;

// Stripes of a slot's newest message that have arrived: tag << 32 | bit set.
constexpr uint64_t arrivals_of(uint8_t tag, uint32_t stripes) {
  return uint64_t{tag} << 32 | stripes;
}
constexpr uint8_t tag_of(uint64_t arrivals) { return static_cast<uint8_t>(arrivals >> 32); }
constexpr uint32_t stripes_of(uint64_t arrivals) { return static_cast<uint32_t>(arrivals); }
constexpr uint32_t all_stripes(uint32_t count) {
  return count >= 32 ? 0xffffffffu : (1u << count) - 1;
}

// Returns `before` with one more stripe; unchanged if the stripe is known or belongs to an older
// message.
uint64_t with_arrival(uint64_t before, uint8_t tag, uint8_t stripe);

}  // namespace afd_comm

// Backend tcp: the bytes on the connection. Little endian, as in memory.
//
//   sender:   Hello, then any number of (FrameHead, bytes of part 0, bytes of part 1, ...)
//   receiver: Welcome, then nothing; before it hangs up on a sender that behaves, one byte Status
//   says why, on the link's first connection
//
// A link has one connection or several. A frame is a stripe of a message: the stripes of one
// message may come in any order on any of the link's connections.
#pragma once

#include <cstddef>

#include "afd_comm/types.h"

namespace afd_comm {

constexpr uint32_t kTcpVersion = 5;
// Stripes of a message.
constexpr uint32_t kMaxTcpStripes = 1u << 20;
constexpr uint32_t kHelloMagic = 0x48444641;    // "AFDH"
constexpr uint32_t kWelcomeMagic = 0x57444641;  // "AFDW"
constexpr uint32_t kFrameMagic = 0x46444641;    // "AFDF"

struct Hello {
  uint32_t magic;
  uint32_t version;
  uint8_t token[16];
  uint32_t first;  // claimed slots
  uint32_t count;
  uint64_t link;    // random; the same on all connections of a link
  uint32_t number;  // of the connection in its link; 0 makes the claim and comes first
  uint32_t reserved;
};
static_assert(sizeof(Hello) == 48, "no padding on the wire");
// What every version sends first, so that one can tell another why it is refused.
constexpr std::size_t kHelloStart = offsetof(Hello, link);

struct Welcome {
  uint32_t magic;
  uint32_t version;
  int32_t status;  // Status of the claim
  uint32_t slots;
  uint64_t slot_bytes;
};
static_assert(sizeof(Welcome) == 24, "no padding on the wire");

struct FramePart {
  uint64_t offset;
  uint64_t nbytes;
};

struct FrameHead {
  uint32_t magic;
  uint32_t slot;
  uint64_t flag;
  uint32_t part_count;
  uint32_t stripes;            // frames of this message
  uint64_t sequence;           // of the message in its link, from 1
  Header header;               // of the message
  Times times;                 // valid if header.traced; the receiver fills in arrived and consumed
  FramePart parts[kMaxParts];  // of the stripe. Fixed size: one read gets it all
};
static_assert(sizeof(FrameHead) == 32 + sizeof(Header) + sizeof(Times) + kMaxParts * 16,
              "no padding on the wire");

}  // namespace afd_comm

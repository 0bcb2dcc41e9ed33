// Backend tcp: the bytes on the connection. Little endian, as in memory.
//
//   sender:   Hello, then any number of (FrameHead, bytes of part 0, bytes of part 1, ...)
//   receiver: Welcome, then nothing; before it hangs up on a sender that behaves, one byte Status
//   says why
#pragma once

#include "afd_comm/types.h"

namespace afd_comm {

constexpr uint32_t kTcpVersion = 4;
constexpr uint32_t kHelloMagic = 0x48444641;    // "AFDH"
constexpr uint32_t kWelcomeMagic = 0x57444641;  // "AFDW"
constexpr uint32_t kFrameMagic = 0x46444641;    // "AFDF"

struct Hello {
  uint32_t magic;
  uint32_t version;
  uint8_t token[16];
  uint32_t first;  // claimed slots
  uint32_t count;
};
static_assert(sizeof(Hello) == 32, "no padding on the wire");

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
  uint32_t reserved;
  Header header;
  Times times;                 // valid if header.traced; the receiver fills in arrived and consumed
  FramePart parts[kMaxParts];  // fixed size: one read gets it all
};
static_assert(sizeof(FrameHead) == 24 + sizeof(Header) + sizeof(Times) + kMaxParts * 16,
              "no padding on the wire");

}  // namespace afd_comm

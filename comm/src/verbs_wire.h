// Backend verbs: the handshake over TCP, and the records in the receiver's memory.
//
//   sender                               receiver
//   VerbsHello (token, claim)         ->
//                                     <- VerbsWelcome (geometry, ports, or why not)
//   VerbsConnect (its queue pairs)    ->
//                                     <- VerbsAccept (the other halves, keys, or why not)
//   a test packet over every queue pair; then messages, by RDMA alone
//   VerbsFence (a failed queue pair)  ->
//                                     <- VerbsFenced (what arrived before it was closed)
//                                     <- VerbsFarewell (why the receiver hangs up)
//
// Little endian, fixed sizes. The connection stays open: its end shows a peer's death.
#pragma once

#include <cstring>
#include <string>

#include "afd_comm/types.h"
#include "afd_comm/verbs.h"
#include "verbs_abi.h"

namespace afd_comm {

constexpr uint32_t kVerbsVersion = 5;
constexpr uint32_t kVerbsHelloMagic = 0x31564641;    // "AFV1"
constexpr uint32_t kVerbsWelcomeMagic = 0x32564641;  // "AFV2"
constexpr uint32_t kVerbsConnectMagic = 0x33564641;
constexpr uint32_t kVerbsAcceptMagic = 0x34564641;
constexpr uint32_t kVerbsFenceMagic = 0x35564641;
constexpr uint32_t kVerbsFencedMagic = 0x36564641;
constexpr uint32_t kVerbsFarewellMagic = 0x37564641;
constexpr std::size_t kReasonBytes = 488;

struct VerbsHello {
  uint32_t magic;
  uint32_t version;
  uint8_t token[16];
  uint32_t first;  // claimed slots
  uint32_t count;
};
static_assert(sizeof(VerbsHello) == 32, "no padding on the wire");

struct WirePort {
  char name[64];
  ib::Gid gid;
  uint16_t lid;
  uint8_t link_layer;
  uint8_t mtu;
  uint8_t active;
  uint8_t reserved[3];
};
static_assert(sizeof(WirePort) == 88, "no padding on the wire");

struct VerbsWelcome {
  uint32_t magic;
  uint32_t version;
  int32_t status;
  uint32_t slots;
  uint64_t slot_bytes;
  uint64_t stride;  // from one payload to the next
  uint32_t port_count;
  uint32_t payloads;  // slots with the same remainder share one
  WirePort ports[kMaxVerbsPorts];
  char reason[kReasonBytes];  // of a refusal; ends with 0
};
static_assert(sizeof(VerbsWelcome) == 40 + kMaxVerbsPorts * 88 + kReasonBytes,
              "no padding on the wire");

// One half of a queue pair.
struct WireQp {
  uint32_t qpn;
  uint32_t psn;
  ib::Gid gid;
  uint16_t lid;
  uint8_t mtu;
  uint8_t port;           // VerbsConnect: index into VerbsWelcome::ports
  uint32_t payload_rkey;  // VerbsAccept
  uint32_t records_rkey;  // VerbsAccept
  uint32_t refused;       // VerbsAccept: this half could not be connected
};
static_assert(sizeof(WireQp) == 40, "no padding on the wire");

struct VerbsConnect {
  uint32_t magic;
  uint32_t count;
  WireQp qps[kMaxVerbsQps];
};

struct VerbsAccept {
  uint32_t magic;
  int32_t status;
  uint64_t payload;  // address of the first payload
  uint64_t records;  // address of the first claimed slot's record; behind the last one there is
                     // room for the test packet
  uint32_t staged;   // 1: records need extents
  uint32_t reserved;
  WireQp qps[kMaxVerbsQps];
  char reason[kReasonBytes];  // of `status`, or of the last half that was refused
};

struct VerbsFence {
  uint32_t magic;
  uint32_t qp;
};

struct VerbsReply {  // head of the receiver's later messages
  uint32_t magic;
  uint32_t qp;     // VerbsFenced
  int32_t status;  // VerbsFarewell
  uint32_t count;  // VerbsFenced: uint64_t arrivals[count] follow, see verbs_plan.h
};

constexpr std::size_t kTestBytes = 4096;  // the largest path MTU

struct Extent {
  uint64_t offset;
  uint64_t nbytes;
};

// Follows a message's payload on the leading queue pair. The peer's NIC writes it at any time: read
// only a copy, and use it only if head, tail and immediate agree.
struct Record {
  uint32_t head;  // number of the message in its slot
  uint32_t slot;
  uint64_t flag;
  Header header;
  uint32_t order;   // number of the message in its link, from 1: doorbells ring in this order
  uint32_t before;  // order of the slot's previous message, 0: none
  uint32_t stripes;
  uint32_t tail;  // as head
  Times times;    // sent only if header.traced
  // Where the parts are in the slot: sent only to a receiver that copies them to a device itself.
  Extent extents[kMaxParts];
};
static_assert(sizeof(Record) == 32 + sizeof(Header) + sizeof(Times) + kMaxParts * sizeof(Extent),
              "no padding on the wire");
constexpr std::size_t kPlainRecordBytes = 32 + sizeof(Header);
constexpr std::size_t kTracedRecordBytes = kPlainRecordBytes + sizeof(Times);
constexpr std::size_t kRecordStride = 320;
static_assert(sizeof(Record) <= kRecordStride, "one record per stride");

inline void set_reason(char (&out)[kReasonBytes], const std::string& text) {
  std::memset(out, 0, sizeof out);
  std::memcpy(out, text.data(), text.size() < sizeof out ? text.size() : sizeof out - 1);
}
inline std::string get_reason(const char (&in)[kReasonBytes]) {
  return std::string(in, strnlen(in, sizeof in));
}

}  // namespace afd_comm

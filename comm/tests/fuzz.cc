// Fuzz target: every parser of untrusted bytes. Built with libFuzzer (clang), or with
// fuzz_replay.cc where clang is missing; see fuzz.sh.
//
// Input: byte 0 selects the parser. For the tcp connection, byte 1 is the size of the chunks in
// which the rest is sent (0: all at once), and bit 7 of byte 0 sends a greeting with the right
// token first.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "../src/tcp_connection.h"
#include "afd_comm/trace.h"

using namespace afd_comm;

namespace {

constexpr uint32_t kSlots = 3;
constexpr uint64_t kSlotBytes = 192;
constexpr uint32_t kClaimed = 1;

void require(bool ok, const char* what) {
  if (ok) return;
  fprintf(stderr, "fuzz: violated: %s\n", what);
  abort();
}

struct Target {
  Token token = random_token();
  Memory memory = Memory::create(Geometry::of(kSlots, kSlotBytes), token, "fuzz");
  Fd lock{open(("/proc/self/fd/" + std::to_string(memory.fd().get())).c_str(), O_RDWR | O_CLOEXEC)};
  PeerTrace trace;
};

void tcp(Target& target, bool greet, const uint8_t* data, std::size_t size) {
  if (size == 0) return;
  const std::size_t piece = data[0] == 0 ? size : data[0];
  ++data;
  --size;
  int ends[2];
  require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0, "socketpair succeeds");
  const Fd peer(ends[1]);
  {
    TcpPeers peers(target.memory, target.token, target.lock.get());
    TcpConnection connection(Fd(ends[0]), peers, nullptr);
    bool open = true;
    if (greet) {
      Hello hello{kHelloMagic, kTcpVersion, {}, kClaimed, 1, 7, 0, 0};
      std::memcpy(hello.token, target.token.data(), target.token.size());
      require(write(peer.get(), &hello, sizeof hello) == sizeof hello,
              "the greeting fits into the socket");
      open = connection.on_readable();
      require(open && connection.greeted(), "the right token is accepted");
    }
    while (open && size != 0) {
      const ssize_t n = write(peer.get(), data, std::min(piece, size));
      require(n > 0, "the input fits into the socket");
      data += n;
      size -= static_cast<std::size_t>(n);
      // Reads until the socket is empty, as the receiver's epoll loop does.
      uint8_t byte;
      // A stripe may have to wait for one that never comes.
      while (open && !connection.stalled() &&
             recv(connection.fd(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0)
        open = connection.on_readable();
      if (connection.stalled()) break;
    }
    // Without the token nothing is claimed; with it, only the claimed slot is written.
    require(connection.greeted() || connection.peer() == nullptr, "no claim without a greeting");
  }
  for (uint32_t slot = 0; slot < kSlots; ++slot) {
    const SlotControl& control = target.memory.control(slot);
    if (slot != kClaimed) {
      require(control.doorbell.load() == 0, "an unclaimed slot's doorbell stays 0");
      for (uint64_t i = 0; i < kSlotBytes; ++i)
        require(target.memory.payload(slot)[i] == 0, "an unclaimed slot's payload stays 0");
    } else if (control.doorbell.load() != 0) {
      require(control.header.nbytes >= 0 &&
                  control.header.nbytes <= static_cast<int64_t>(kMaxParts * kSlotBytes),
              "a message size is within its bounds");
    }
  }
}

void addresses(const uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  try {
    // An accepted address survives a round trip.
    const ShmAddress shm = parse_shm(text);
    require(format(parse_shm(format(shm))) == format(shm), "shm address round trip");
  } catch (const CommError&) {
  }
  try {
    const TcpAddress tcp_address = parse_tcp(text);
    require(format(parse_tcp(format(tcp_address))) == format(tcp_address),
            "tcp address round trip");
  } catch (const CommError&) {
  }
}

void times(Target& target, const uint8_t* data, std::size_t size) {
  Times t;
  for (; size >= sizeof t; data += sizeof t, size -= sizeof t) {
    std::memcpy(&t, data, sizeof t);
    target.trace.note(Header{}, t);
    static_cast<void>(target.trace.offset());
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  static Target target;
  if (size == 0) return 0;
  switch (data[0] & 7) {
    case 0:
      addresses(data + 1, size - 1);
      break;
    case 1:
      times(target, data + 1, size - 1);
      break;
    default:
      tcp(target, (data[0] & 0x80) != 0, data + 1, size - 1);
  }
  return 0;
}

// Textual addresses of a region: where to reach it, and its secret token.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "afd_comm/accelerator.h"

namespace afd_comm {

using Token = std::array<uint8_t, 16>;

Token random_token();
// Takes the same time whatever the content.
bool same_token(const uint8_t* a, const uint8_t* b);
std::string token_text(const Token& token);

// "shm:<machine>:<pid>:<fd>:<bytes>:<token>"
struct ShmAddress {
  std::string machine;  // machine_identity() of the owner
  int pid = 0;
  int fd = 0;
  uint64_t bytes = 0;
  Token token{};
};

// "<scheme>:<host>:<port>:<token>", scheme tcp or verbs; an IPv6 host stands in brackets
struct TcpAddress {
  std::string scheme = "tcp";
  std::string host;
  uint16_t port = 0;
  Token token{};
};

// "ipc:<device>:<number>:<pointer>:<handle>:", then the fields of a shm address. The slots are in
// device memory.
struct IpcAddress {
  ShmAddress memory;  // of doorbells and headers
  Device device;
  uint64_t pointer = 0;  // of the slots, in the owner's address space
  MemoryHandle handle{};
};

std::string format(const ShmAddress& address);
std::string format(const IpcAddress& address);
std::string format(const TcpAddress& address);

// The part before the first colon.
std::string scheme_of(const std::string& address);
// Throw CommError when the text is not an address of that scheme.
ShmAddress parse_shm(const std::string& text);
TcpAddress parse_tcp(const std::string& text, const std::string& scheme = "tcp");
IpcAddress parse_ipc(const std::string& text);

}  // namespace afd_comm

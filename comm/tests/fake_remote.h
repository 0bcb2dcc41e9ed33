// fake_ibverbs.cc between two processes of a host: the wire is a socket. Bytes travel over it,
// except from one device memory to another, which the sender copies through a mapping.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "fake_gpu_memory.h"
#include "fake_lock.h"

namespace fake_remote {

enum class Kind : uint32_t {
  Write,    // `length` bytes follow; no answer
  Last,     // the same with an immediate; the answer is a status
  Describe  // the answer is a Place
};

struct Frame {
  Kind kind;
  uint32_t qpn;
  uint32_t rkey;
  uint32_t imm;
  uint64_t addr;
  uint32_t length;  // of the write
  uint32_t bytes;   // that follow: 0 if the sender has copied them already
};

struct Place {
  uint64_t base = 0;
  uint64_t length = 0;
  uint32_t device = 0;
  uint32_t reserved = 0;
  fake_gpu::Shared shared;
};

constexpr int kNotReady = -1;  // answer: no receive is posted

inline sockaddr_un address_of(int pid, socklen_t& length) {
  sockaddr_un out{};
  out.sun_family = AF_UNIX;
  const int n = snprintf(out.sun_path + 1, sizeof out.sun_path - 1, "afd-fake-verbs-%d", pid);
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<size_t>(n));
  return out;
}

// Returns false when the other end is gone. With a spare core it looks for a while before it
// sleeps, so that an emulated NIC costs little more than its line.
inline bool receive(int fd, void* out, std::size_t size) {
  const std::chrono::microseconds looks(spare_cores() ? 500 : 0);
  const auto until = std::chrono::steady_clock::now() + looks;
  for (std::size_t have = 0; have < size;) {
    const bool look = std::chrono::steady_clock::now() < until;
    const ssize_t n =
        recv(fd, static_cast<char*>(out) + have, size - have, look ? MSG_DONTWAIT : 0);
    if (n > 0) have += static_cast<std::size_t>(n);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) return false;
  }
  return true;
}

inline bool send_all(int fd, const void* data, std::size_t size) {
  for (std::size_t sent = 0; sent < size;) {
    const ssize_t n = send(fd, static_cast<const char*>(data) + sent, size - sent, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    sent += static_cast<std::size_t>(n);
  }
  return true;
}

inline int connect_to(int pid) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  socklen_t length = 0;
  const sockaddr_un to = address_of(pid, length);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&to), length) == 0) return fd;
  close(fd);
  return -1;
}

// Serves the other processes until this one ends. `write` and `last` return a status of ib::.
template <typename Serve>
void listen_for_peers(Serve serve) {
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  socklen_t length = 0;
  const sockaddr_un here = address_of(getpid(), length);
  if (bind(listener, reinterpret_cast<const sockaddr*>(&here), length) != 0 ||
      listen(listener, 64) != 0) {
    close(listener);
    return;
  }
  std::thread([listener, serve] {
    while (true) {
      const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
      if (fd < 0) continue;
      std::thread([fd, serve] {
        serve(fd);
        close(fd);
      }).detach();
    }
  }).detach();
}

}  // namespace fake_remote

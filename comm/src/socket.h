// Non-blocking sockets with deadlines.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <string>

#include "afd_comm/process.h"
#include "afd_comm/types.h"

namespace afd_comm {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

// `numeric`: no name service is asked. Throws CommError.
SocketAddress resolve(const std::string& host, uint16_t port, bool numeric);
std::string host_of(const SocketAddress& address);
uint16_t port_of(const SocketAddress& address);
bool is_wildcard(const SocketAddress& address);

// No Nagle delay; a peer whose host vanished without a word is noticed within about five seconds.
void tune(int fd);

enum class Poll { Ready, Deadline, Interrupted };
// Waits for poll(2) `events`, in slices so that `interrupt` (may be null) is asked now and then.
Poll poll_until(int fd, short events, uint64_t deadline, Interrupt interrupt);

}  // namespace afd_comm

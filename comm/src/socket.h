// Non-blocking sockets with deadlines.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <string>

#include "afd_comm/address.h"
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

// Listens without blocking on one address of this host; `option` is what the user calls the host.
// `bound` becomes the address with its port. Throws CommError.
Fd listen_on(const std::string& host, uint16_t port, SocketAddress& bound, const char* option);

// "host:port", without the token.
std::string place(const TcpAddress& address);
// Non-blocking and tuned. Throws CommError.
Fd connect_until(const TcpAddress& address, uint64_t deadline, Interrupt interrupt);
// Reads exactly `size` bytes of the region's answer. Throws CommError.
void receive_all(const Fd& fd, void* out, std::size_t size, uint64_t deadline,
                 const TcpAddress& from, Interrupt interrupt);

// The next connection that waits at a non-blocking listener; none if there is none. Out of
// descriptors it breathes for 5 ms instead: the listener stays readable, and its owner would spin.
Fd accept_connection(const Fd& listener);

}  // namespace afd_comm

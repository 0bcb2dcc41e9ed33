// The backends' constructors. Each throws CommError.
#pragma once

#include "afd_comm/link.h"
#include "afd_comm/memory.h"
#include "afd_comm/receiver.h"
#include "afd_comm/verbs.h"

namespace afd_comm {

std::unique_ptr<Link> open_ipc_link(const std::string& address, const LinkOptions& options);
std::unique_ptr<Link> open_shm_link(const std::string& address, const LinkOptions& options);
std::unique_ptr<Link> open_tcp_link(const std::string& address, const LinkOptions& options);
std::unique_ptr<Link> open_verbs_link(const std::string& address, const LinkOptions& options);

// Listens on `host`:`port` (0: the kernel chooses) and writes frames into `memory`, which must
// outlive it.
std::unique_ptr<Receiver> open_tcp_receiver(const Memory& memory, const Token& token,
                                            const std::string& host, uint16_t port);
// Registers the payloads of `memory`, which lie on `device`, with the NICs of the options' ports
// and lets peers write into it.
std::unique_ptr<Receiver> open_verbs_receiver(const Memory& memory, const Token& token,
                                              Device device, const VerbsOptions& options);

}  // namespace afd_comm

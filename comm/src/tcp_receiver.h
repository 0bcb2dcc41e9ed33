// Backend tcp: the receiving side.
#pragma once

#include <memory>

#include "afd_comm/region.h"

namespace afd_comm {

// Listens on options.tcp_host:tcp_port and writes frames into `memory`, which must outlive it.
// Returns null without a tcp_host. Throws CommError.
std::unique_ptr<Receiver> open_tcp_receiver(const Memory& memory, const Token& token,
                                            const RegionOptions& options);

}  // namespace afd_comm

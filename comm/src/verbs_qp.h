// Backend verbs: one reliable connection.
#pragma once

#include <memory>

#include "verbs_nic.h"
#include "verbs_wire.h"

namespace afd_comm {

struct QpDepth {
  uint32_t send = 1;
  uint32_t recv = 1;
};

class QueuePair {
 public:
  // In state INIT. Throws CommError.
  QueuePair(std::shared_ptr<Nic> nic, const PortFacts& port, const CompletionQueue& cq,
            QpDepth depth);
  ~QueuePair();
  QueuePair(const QueuePair&) = delete;

  // This half, for the peer.
  WireQp half() const;
  // Ready to receive and to send. Throws CommError naming both ports.
  void connect(const WireQp& peer, const std::string& peer_port, const VerbsOptions& options);
  // Nothing is received or sent any more; what is outstanding completes with an error. Idempotent.
  void fail();

  bool post_send(ib::SendWr* first);
  bool post_recv(uint64_t wr_id);

  const PortFacts& port() const { return port_; }
  uint32_t max_inline() const { return max_inline_; }

 private:
  std::shared_ptr<Nic> nic_;
  PortFacts port_;
  ib::Qp* qp_ = nullptr;
  uint32_t psn_ = 0;
  uint32_t max_inline_ = 0;
};

}  // namespace afd_comm

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

  // Returns this half's description for the peer.
  WireQp half() const;
  // Makes the queue pair ready to receive and send. Throws CommError, which names both ports.
  void connect(const WireQp& peer, const std::string& peer_port, const VerbsOptions& options);
  // Stops receiving and sending; outstanding work completes with an error. Idempotent.
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

// Backend verbs: libibverbs, loaded at run time. Always the system's copy: a bundled one would not
// find the system's device drivers.
#pragma once

#include <string>

#include "afd_comm/types.h"
#include "verbs_abi.h"

namespace afd_comm {

// The provider's functions. Tests replace them (replace_verbs).
struct Verbs {
  ib::Device** (*get_device_list)(int* count);
  void (*free_device_list)(ib::Device** list);
  const char* (*get_device_name)(ib::Device* device);
  ib::Context* (*open_device)(ib::Device* device);
  int (*close_device)(ib::Context* context);
  int (*query_device)(ib::Context* context, ib::DeviceAttr* attr);
  int (*query_port)(ib::Context* context, uint8_t port, ib::PortAttr* attr);
  int (*query_gid)(ib::Context* context, uint8_t port, int index, ib::Gid* gid);
  ib::Pd* (*alloc_pd)(ib::Context* context);
  int (*dealloc_pd)(ib::Pd* pd);
  ib::Mr* (*reg_mr)(ib::Pd* pd, void* addr, std::size_t length, int access);
  ib::Mr* (*reg_mr_iova2)(ib::Pd* pd, void* addr, std::size_t length, uint64_t iova,
                          unsigned access);  // null before rdma-core 28
  ib::Mr* (*reg_dmabuf_mr)(ib::Pd* pd, uint64_t offset, std::size_t length, uint64_t iova, int fd,
                           int access);  // null before rdma-core 34
  int (*dereg_mr)(ib::Mr* mr);
  ib::CompChannel* (*create_comp_channel)(ib::Context* context);
  int (*destroy_comp_channel)(ib::CompChannel* channel);
  ib::Cq* (*create_cq)(ib::Context* context, int entries, void* cq_context,
                       ib::CompChannel* channel, int vector);
  int (*destroy_cq)(ib::Cq* cq);
  int (*get_cq_event)(ib::CompChannel* channel, ib::Cq** cq, void** cq_context);
  void (*ack_cq_events)(ib::Cq* cq, unsigned count);
  ib::Qp* (*create_qp)(ib::Pd* pd, ib::QpInitAttr* attr);
  int (*modify_qp)(ib::Qp* qp, ib::QpAttr* attr, int mask);
  int (*destroy_qp)(ib::Qp* qp);
  const char* (*wc_status_str)(int status);
  // Inline functions of libibverbs, which call through the device's table.
  int (*poll_cq)(ib::Cq* cq, int entries, ib::Wc* out);
  int (*req_notify_cq)(ib::Cq* cq, int solicited_only);
  int (*post_send)(ib::Qp* qp, ib::SendWr* wr, ib::SendWr** bad);
  int (*post_recv)(ib::Qp* qp, ib::RecvWr* wr, ib::RecvWr** bad);
};

// Loads once per name and stays loaded. Throws CommError naming the package to install.
const Verbs& load_verbs(const std::string& library);

// Makes load_verbs(library) return this table from now on. For tests.
void replace_verbs(const std::string& library, const Verbs& table);

}  // namespace afd_comm

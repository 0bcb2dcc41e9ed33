#include "verbs_library.h"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>

namespace afd_comm {
namespace {

std::mutex loading;

// Libraries stay loaded: their device drivers do not survive an unload.
std::map<std::string, std::unique_ptr<Verbs>>& loaded() {
  static auto* libraries = new std::map<std::string, std::unique_ptr<Verbs>>;
  return *libraries;
}

int poll_cq(ib::Cq* cq, int entries, ib::Wc* out) {
  return cq->context->ops.poll_cq(cq, entries, out);
}
int req_notify_cq(ib::Cq* cq, int solicited_only) {
  return cq->context->ops.req_notify_cq(cq, solicited_only);
}
int post_send(ib::Qp* qp, ib::SendWr* wr, ib::SendWr** bad) {
  return qp->context->ops.post_send(qp, wr, bad);
}
int post_recv(ib::Qp* qp, ib::RecvWr* wr, ib::RecvWr** bad) {
  return qp->context->ops.post_recv(qp, wr, bad);
}

template <typename Function>
void fetch(Function& out, void* handle, const char* name, const std::string& library) {
  out = reinterpret_cast<Function>(dlsym(handle, name));
  if (out == nullptr && !library.empty())
    throw CommError(library + " has no " + name +
                    "; it is not libibverbs, or too old: install the system's rdma-core");
}

std::unique_ptr<Verbs> load(const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    throw CommError("cannot load " + library + " (" + (reason != nullptr ? reason : "no reason") +
                    "); install the system's RDMA libraries (Debian, Ubuntu: apt-get install "
                    "libibverbs1 ibverbs-providers; Fedora, RHEL: dnf install libibverbs)");
  }
  auto v = std::make_unique<Verbs>();
  fetch(v->get_device_list, handle, "ibv_get_device_list", library);
  fetch(v->free_device_list, handle, "ibv_free_device_list", library);
  fetch(v->get_device_name, handle, "ibv_get_device_name", library);
  fetch(v->open_device, handle, "ibv_open_device", library);
  fetch(v->close_device, handle, "ibv_close_device", library);
  fetch(v->query_device, handle, "ibv_query_device", library);
  fetch(v->query_port, handle, "ibv_query_port", library);
  fetch(v->query_gid, handle, "ibv_query_gid", library);
  fetch(v->alloc_pd, handle, "ibv_alloc_pd", library);
  fetch(v->dealloc_pd, handle, "ibv_dealloc_pd", library);
  fetch(v->reg_mr, handle, "ibv_reg_mr", library);
  fetch(v->reg_mr_iova2, handle, "ibv_reg_mr_iova2", "");
  fetch(v->reg_dmabuf_mr, handle, "ibv_reg_dmabuf_mr", "");
  fetch(v->dereg_mr, handle, "ibv_dereg_mr", library);
  fetch(v->create_comp_channel, handle, "ibv_create_comp_channel", library);
  fetch(v->destroy_comp_channel, handle, "ibv_destroy_comp_channel", library);
  fetch(v->create_cq, handle, "ibv_create_cq", library);
  fetch(v->destroy_cq, handle, "ibv_destroy_cq", library);
  fetch(v->get_cq_event, handle, "ibv_get_cq_event", library);
  fetch(v->ack_cq_events, handle, "ibv_ack_cq_events", library);
  fetch(v->create_qp, handle, "ibv_create_qp", library);
  fetch(v->modify_qp, handle, "ibv_modify_qp", library);
  fetch(v->destroy_qp, handle, "ibv_destroy_qp", library);
  fetch(v->wc_status_str, handle, "ibv_wc_status_str", library);
  v->poll_cq = poll_cq;
  v->req_notify_cq = req_notify_cq;
  v->post_send = post_send;
  v->post_recv = post_recv;
  return v;
}

}  // namespace

const Verbs& load_verbs(const std::string& library) {
  const std::lock_guard<std::mutex> lock(loading);
  std::unique_ptr<Verbs>& entry = loaded()[library];
  if (entry == nullptr) entry = load(library);
  return *entry;
}

void replace_verbs(const std::string& library, const Verbs& table) {
  const std::lock_guard<std::mutex> lock(loading);
  loaded()[library] = std::make_unique<Verbs>(table);
}

}  // namespace afd_comm

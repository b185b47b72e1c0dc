// What the fake device says about itself, and the named counters.
//
// ASCEND_EMULATOR_SOC names the chip (default Ascend910B1, an A2; Ascend910_9391 is an A3) and ASCEND_EMULATOR_CANN the
// CANN version. Both change what is reported, not what is computed.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "runtime.h"

namespace emulator {

namespace {
std::mutex counter_mutex;
std::map<std::string, long> counters;
using AskOrigin = int (*)();
std::atomic<AskOrigin> ask_origin{nullptr};
std::vector<std::string> origins;
thread_local int current_device = 0;

const char* setting(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value ? value : otherwise;
}
}  // namespace

void count(const std::string& name, long by) {
  std::lock_guard<std::mutex> lock(counter_mutex);
  counters[name] += by;
}

void count_request(const std::string& name) {
  count(name);
  if (const AskOrigin ask = ask_origin.load()) count(origins.at(ask()) + ": " + name);
}

void report(const std::string& message) {
  count("refused: " + message);
  std::fprintf(stderr, "[ascend emulator] %s\n", message.c_str());
}

}  // namespace emulator

using namespace emulator;

// Write the counters as "name<TAB>number" lines; returns the bytes needed, so that a caller can ask again with more.
EXPORT long ascend_emulator_counters(char* buffer, long size) {
  std::lock_guard<std::mutex> lock(counter_mutex);
  std::string text;
  for (const auto& [name, number] : counters) text += name + "\t" + std::to_string(number) + "\n";
  if (static_cast<long>(text.size()) < size) std::memcpy(buffer, text.c_str(), text.size() + 1);
  return static_cast<long>(text.size()) + 1;
}
EXPORT void ascend_emulator_reset_counters() {
  std::lock_guard<std::mutex> lock(counter_mutex);
  counters.clear();
}
// Have `ask` say who makes a request, as an index into `names`; called in the thread that makes it. Null: nobody asks.
EXPORT void ascend_emulator_attribute(AskOrigin ask, const char* const* names, int number) {
  if (ask) origins.assign(names, names + number);
  ask_origin = ask;
}
// Called by every stub of a function that is not emulated (see build.py): answers success, and is counted.
EXPORT long ascend_emulator_stub(const char* name) {
  count(std::string("stub: ") + name);
  return ACL_SUCCESS;
}

EXPORT aclError aclInit(const char*) { return ACL_SUCCESS; }
EXPORT aclError aclFinalize() { return ACL_SUCCESS; }
EXPORT const char* aclGetRecentErrMsg() { return "see the lines marked [ascend emulator]"; }
EXPORT const char* aclrtGetSocName() { return setting("ASCEND_EMULATOR_SOC", "Ascend910B1"); }
EXPORT aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
  std::memset(version, 0, sizeof *version);
  std::strcpy(version->version, setting("ASCEND_EMULATOR_CANN", "9.1.0"));
  return ACL_SUCCESS;
}
EXPORT aclError aclsysGetVersionStr(char*, char* version) {
  std::strcpy(version, setting("ASCEND_EMULATOR_CANN", "9.1.0"));
  return ACL_SUCCESS;
}

EXPORT aclError aclrtGetDeviceCount(uint32_t* number) {
  *number = 1;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtGetDevice(int32_t* device) {
  *device = current_device;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtSetDevice(int32_t device) {
  current_device = device;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }
EXPORT aclError aclrtGetCurrentContext(aclrtContext* context) {
  *context = reinterpret_cast<aclrtContext>(0x1000);
  return ACL_SUCCESS;
}
EXPORT aclError aclrtSetCurrentContext(aclrtContext) { return ACL_SUCCESS; }
EXPORT aclError aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
  if (flags) *flags = 0;
  if (active) *active = 1;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t* const logic) {
  *logic = user;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtDeviceCanAccessPeer(int32_t* answer, int32_t, int32_t) {
  *answer = 0;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return ACL_SUCCESS; }
EXPORT aclError aclGetCannAttribute(aclCannAttr, int32_t* value) {
  *value = 1;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t* value) {
  *value = 0;
  return ACL_SUCCESS;
}

// 24 cube and 48 vector cores, as an Ascend910B1 has.
EXPORT aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t* value) {
  *value = 24;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr, int64_t* value) {
  *value = 24;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtGetStreamResLimit(aclrtStream, aclrtDevResLimitType type, uint32_t* value) {
  *value = type == 0 ? 24 : 48;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtGetDeviceResLimit(int32_t, aclrtDevResLimitType type, uint32_t* value) {
  *value = type == 0 ? 24 : 48;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtGetResInCurrentThread(aclrtDevResLimitType type, uint32_t* value) {
  *value = type == 0 ? 24 : 48;
  return ACL_SUCCESS;
}
EXPORT size_t aclGetCompileoptSize(aclCompileOpt) { return 16; }
EXPORT aclError aclGetCompileopt(aclCompileOpt, char* value, size_t size) {
  std::strncpy(value, "disable", size);
  value[size - 1] = '\0';
  return ACL_SUCCESS;
}

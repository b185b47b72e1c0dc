// Graph capture, replay, and task groups whose tasks may be replaced between replays.
#include <cstdio>

#include "runtime.h"

using namespace emulator;

namespace {
uint64_t groups_made = 0;
}

EXPORT aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode) {
  Lock lock(mutex);
  Stream* stream = stream_of(handle);
  if (stream->capture) {
    report("a capture was begun on a stream that is capturing already");
    return ACL_ERROR_RT_STREAM_CAPTURED;
  }
  auto* graph = new Graph;
  graph->active = true;
  graph->streams.insert(stream);
  stream->capture = graph;
  return ACL_SUCCESS;
}

EXPORT aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus* status, aclmdlRI* graph) {
  Lock lock(mutex);
  Stream* stream = stream_of(handle);
  *status = stream->capture ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  if (graph) *graph = stream->capture;
  return ACL_SUCCESS;
}

EXPORT aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI* result) {
  Lock lock(mutex);
  Stream* stream = stream_of(handle);
  if (!stream->capture) return ACL_ERROR_RT_STREAM_NOT_CAPTURED;
  Graph* graph = stream->capture;
  for (Stream* member : graph->streams) member->capture = nullptr;
  graph->active = false;
  *result = graph;
  count("captures");
  if (stream->open_group) {
    report("a capture ended inside a task group");
    return ACL_ERROR_STREAM_TASK_GROUP_STATUS;
  }
  return ACL_SUCCESS;
}

EXPORT aclError aclmdlRIExecuteAsync(aclmdlRI handle, aclrtStream stream_handle) {
  auto* graph = static_cast<Graph*>(handle);
  Stream* stream = stream_of(stream_handle);
  {
    Lock lock(mutex);
    if (stream->capture) {
      report("a graph was replayed on a stream that is capturing");
      return ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT;
    }
    for (const TaskPtr& task : graph->tasks) stream->queue.push_back(task);
  }
  count_request("graph_replays");
  if (!deferring()) run_pending(stream);
  return ACL_SUCCESS;
}

EXPORT aclError aclmdlRIDestroy(aclmdlRI) { return ACL_SUCCESS; }  // leaked: task groups may still name it
EXPORT aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode*) { return ACL_SUCCESS; }

EXPORT aclError aclmdlRIDebugJsonPrint(aclmdlRI handle, const char* path, uint32_t) {
  FILE* file = std::fopen(path, "w");
  if (!file) return ACL_ERROR_INVALID_FILE;
  for (const TaskPtr& task : static_cast<Graph*>(handle)->tasks) {
    std::fprintf(file, "%d %s\n", static_cast<int>(task->kind), task->name.c_str());
  }
  std::fclose(file);
  return ACL_SUCCESS;
}

EXPORT aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle) {
  Lock lock(mutex);
  Stream* stream = stream_of(handle);
  if (!stream->capture) return ACL_ERROR_RT_STREAM_NOT_CAPTURED;
  if (stream->open_group) return ACL_ERROR_STREAM_TASK_GROUP_STATUS;
  stream->open_group = ++groups_made;
  return ACL_SUCCESS;
}

EXPORT aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp* group) {
  Lock lock(mutex);
  Stream* stream = stream_of(handle);
  if (!stream->open_group) return ACL_ERROR_STREAM_TASK_GROUP_STATUS;
  *group = reinterpret_cast<aclrtTaskGrp>(new TaskGroup{stream->capture, stream->open_group});
  stream->open_group = 0;
  return ACL_SUCCESS;
}

EXPORT aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp group_handle) {
  Lock lock(mutex);
  Stream* stream = stream_of(handle);
  if (stream->update) return ACL_ERROR_STREAM_TASK_GROUP_STATUS;
  auto* group = reinterpret_cast<TaskGroup*>(group_handle);
  stream->update = &group->graph->groups[group->id];
  stream->update_position = 0;
  return ACL_SUCCESS;
}

EXPORT aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream handle) {
  bool complete;
  {
    Lock lock(mutex);
    Stream* stream = stream_of(handle);
    if (!stream->update) return ACL_ERROR_STREAM_TASK_GROUP_STATUS;
    complete = stream->update_position == stream->update->size();
    stream->update = nullptr;
  }
  count_request("group_updates");
  if (complete) return ACL_SUCCESS;
  report("a task group was updated with fewer tasks than it has");
  return ACL_ERROR_STREAM_TASK_GROUP_STATUS;
}

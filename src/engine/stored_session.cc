// SPDX-License-Identifier: MIT
// Saving: new rows, new full segments of indexes, queries when they have changed, state; then the
// manifest, which makes all of it count; then what the manifest names no more goes. Row files that
// are not larger than the new one are written again together with it, so that a session of many
// short turns has few of them: each row is written O(log n) times.
#include "fathom/stored_session.h"

#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <utility>

#include "archive/archive_file.h"
#include "archive/file_ops.h"
#include "archive/manifest.h"
#include "archive/session_lock.h"
#include "archive/staging.h"
#include "engine/query_sampling.h"
#include "engine/session_impl.h"
#include "engine/stored_files.h"
#include "fathom/error.h"
#include "fathom/machine.h"
#include "memory/state_stream.h"

namespace fathom {
namespace {

namespace fs = std::filesystem;

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

std::map<std::string, std::string> FingerprintOf(const Model& model) {
  return {{"model", model.fingerprint()},
          {"rope", model.info().rope},
          {"rows", "fp16 key, value"},
          {"block", std::to_string(kBlockTokens)}};
}

// What tells statistics of files apart; "own" without.
std::string StatisticsOf(const Calibration* calibration) {
  if (calibration == nullptr) return "own";
  std::uint64_t sum = 0;
  for (const HeadMoments& head : calibration->moments) {
    for (const auto* part : {&head.key_mean, &head.key_covariance, &head.query_moment}) {
      sum = sum * 31 + Checksum(std::as_bytes(std::span(*part)));
    }
  }
  return "of " + std::to_string(calibration->n_tokens) + " tokens, " + std::to_string(sum);
}

std::string ModelName(const ModelInfo& info) {
  return info.name.empty() ? fs::path(info.path).filename().string() : info.name;
}

struct SavedState {
  std::vector<Token> tokens;
  std::vector<std::int64_t> query_strides;
  std::vector<float> logits;
};

SavedState ReadState(const Manifest& manifest, StateReader* in) {
  SavedState state;
  state.tokens = in->GetAll<Token>(Size(manifest.saved_tokens));
  state.query_strides = in->GetAll<std::int64_t>(Size(manifest.n_layers));
  if (std::ranges::any_of(state.query_strides, [](std::int64_t s) { return s < 1; })) {
    in->Fail("a stride of queries is not positive");
  }
  state.logits = in->GetAll<float>();
  return state;
}

ArchivedFile WriteRows(const fs::path& session, std::uint64_t number, const RowStore& rows,
                       std::int64_t first, std::int64_t count) {
  ArchivedFile file = {number, ArchiveKind::kRows, {}, first, count};
  ArchiveWriter writer(session / file.name(), file.kind);
  const std::int64_t row = std::int64_t{2} * rows.geometry().head_dim;
  const std::vector<std::byte> zeros(Size((WholeBlocks(count) - count) * row) * sizeof(Half));
  for (std::int32_t layer = 0; layer < rows.n_layers(); ++layer) {
    for (std::int32_t h = 0; h < rows.geometry().n_kv_heads; ++h) {
      const Half* from = rows.rows(layer, h) + first * row;
      writer.Append(std::as_bytes(std::span(from, Size(count * row))));
      writer.Append(zeros);
    }
  }
  file.digest = writer.Finish();
  return file;
}

ArchivedFile WriteBytes(const fs::path& session, std::uint64_t number, ArchiveKind kind,
                        std::span<const std::byte> bytes) {
  ArchivedFile file = {number, kind, {}, 0, 0};
  ArchiveWriter writer(session / file.name(), kind);
  writer.Append(bytes);
  file.digest = writer.Finish();
  return file;
}

}  // namespace

struct StoredSession::Impl {
  Impl(SessionFolder& session_folder, const std::string& session_name,
       std::shared_ptr<const Model> session_model)
      : folder(session_folder),
        name(session_name),
        model(std::move(session_model)),
        path(folder.path() / name) {}

  void CheckFingerprint() const;
  std::int64_t SavedBytes() const { return saved ? manifest.Bytes() : 0; }
  bool IsCurrent(const Manifest& next) const;
  void ReadTokens();
  void MapRows(const Session& session, MappedFiles* files) const;
  void Restore(Session& session);
  std::vector<ArchivedFile> SaveRows(const Session::Impl& session, std::uint64_t* number) const;
  Manifest SaveFiles(Session::Impl& session, PieceFile::Places* places) const;

  SessionFolder& folder;
  const std::string name;
  const std::shared_ptr<const Model> model;
  const fs::path path;
  SessionLock lock;
  bool saved = false;  // there is a manifest
  Manifest manifest;
  std::vector<Token> tokens;
  PieceFile::Places places;           // of pieces in files of the manifest
  std::uint64_t queries_version = 0;  // of the session, when its queries were saved or resumed
  std::vector<std::string> evicted;
  std::unique_ptr<Verification> verification;
};

StoredSession::StoredSession(SessionFolder& folder, const std::string& name,
                             std::shared_ptr<const Model> model) {
  SessionFolder::CheckName(name);
  impl_ = std::make_unique<Impl>(folder, name, std::move(model));
  MakeFolders(impl_->path);
  impl_->lock = SessionLock(impl_->path);
  impl_->saved = folder.Has(name);
  if (impl_->saved) {
    impl_->manifest = ReadManifest(impl_->path);
    impl_->CheckFingerprint();
    impl_->ReadTokens();
  } else {
    impl_->manifest.fingerprint = FingerprintOf(*impl_->model);
    impl_->manifest.model = ModelName(impl_->model->info());
    impl_->manifest.heads = impl_->model->info().heads;
    impl_->manifest.n_layers = impl_->model->info().n_layers;
    impl_->manifest.created = NowUnixSeconds();
  }
  RemoveUnnamed(impl_->path, impl_->manifest);
}

StoredSession::~StoredSession() {
  if (impl_->saved) return;
  try {
    RemoveByStaging(impl_->folder.path(), impl_->path);
  } catch (const Error&) {  // an empty folder that is no session stays behind
  }
}

const std::vector<Token>& StoredSession::tokens() const { return impl_->tokens; }
std::int64_t StoredSession::mark() const { return impl_->manifest.mark; }
void StoredSession::set_mark(std::int64_t n_tokens) {
  impl_->manifest.mark = std::max<std::int64_t>(n_tokens, 0);
}
const std::string& StoredSession::method() const { return impl_->manifest.method; }
const std::vector<std::string>& StoredSession::evicted() const { return impl_->evicted; }

void StoredSession::Impl::CheckFingerprint() const {
  const auto mine = FingerprintOf(*model);
  const auto differs = [&](const char* key) {
    const auto found = manifest.fingerprint.find(key);
    return found == manifest.fingerprint.end() || found->second != mine.at(key);
  };
  const auto fail = [&](const std::string& why) {
    throw Error(ErrorCode::kUsage, "session '" + name + "' " + why +
                                       "; use what it was made with, or another --session");
  };
  const auto theirs = [&](const char* key) {
    const auto found = manifest.fingerprint.find(key);
    return found == manifest.fingerprint.end() ? std::string("nothing") : found->second;
  };
  if (manifest.heads != model->info().heads || manifest.n_layers != model->info().n_layers) {
    fail("was made with a model of another shape, '" + manifest.model + "', not '" +
         ModelName(model->info()) + "'");
  }
  if (differs("rope")) {
    fail("was made with other positions (rope): " + theirs("rope") + ", not " + mine.at("rope"));
  }
  if (differs("model")) {
    fail("was made with another model: '" + manifest.model + "' of fingerprint " + theirs("model") +
         ", not '" + ModelName(model->info()) + "' of " + mine.at("model"));
  }
  if (differs("rows"))
    fail("holds rows of another type: " + theirs("rows") + ", not " + mine.at("rows"));
  if (differs("block")) {
    fail("has blocks of " + theirs("block") + " tokens, not " + mine.at("block"));
  }
}

void StoredSession::Impl::ReadTokens() {
  MappedFiles files(name);
  const ArchiveMapping& state = files.MapChecked(path, *manifest.Find(ArchiveKind::kState));
  StateReader in(state.data(), nullptr, "state of session '" + name + "'");
  tokens = ReadState(manifest, &in).tokens;
  const std::int32_t n_vocab = model->info().n_vocab;
  if (std::ranges::any_of(tokens, [n_vocab](Token t) { return t < 0 || t >= n_vocab; })) {
    in.Fail("a token is not in the vocabulary");
  }
  tokens.resize(Size(manifest.n_tokens));
}

std::unique_ptr<Session> StoredSession::Resume(SessionOptions options) {
  if (!impl_->saved) return std::make_unique<Session>(impl_->model, options);
  if (options.method.empty()) options.method = impl_->manifest.method;
  const std::int64_t ctx =
      options.ctx_size == 0 ? impl_->model->info().n_ctx_train : options.ctx_size;
  const std::int64_t n_tokens = impl_->manifest.n_tokens;
  if (n_tokens > ctx) {
    throw Error(ErrorCode::kUsage, "session '" + impl_->name + "' has " + std::to_string(n_tokens) +
                                       " tokens, more than the context of " + std::to_string(ctx) +
                                       "; use -c " + std::to_string(n_tokens) +
                                       " or more, or truncate it (fathom session truncate)");
  }
  const auto made_with = impl_->manifest.fingerprint.find("statistics");
  if (const std::string statistics = StatisticsOf(options.calibration.get());
      made_with == impl_->manifest.fingerprint.end() || made_with->second != statistics) {
    throw Error(
        ErrorCode::kUsage,
        "session '" + impl_->name + "' was made with other statistics (" +
            (made_with == impl_->manifest.fingerprint.end() ? "unknown" : made_with->second) +
            ", not " + statistics + "); give the --stats-file that it was made with, or none");
  }
  // What is mapped need not fit the memory.
  if (options.check_memory) {
    SessionOptions whole = options;
    whole.ctx_size = ctx;
    CheckSessionMemory(impl_->model->info(), MethodSpec::Parse(options.method), whole, n_tokens);
    options.check_memory = false;
  }
  auto session = std::make_unique<Session>(impl_->model, options);
  impl_->Restore(*session);
  return session;
}

void StoredSession::Impl::MapRows(const Session& session, MappedFiles* files) const {
  RowStore& rows = session.impl_->rows;
  for (const ArchivedFile& file : manifest.files) {
    if (file.kind != ArchiveKind::kRows) continue;
    const std::int64_t n = std::min(file.count, manifest.n_tokens - file.first);
    const ArchiveMapping& mapping = files->Map(path, file);
    if (n > 0) {
      rows.Map(file.first, n, WholeBlocks(file.count), mapping.file(),
               static_cast<std::int64_t>(kArchivePage));
    }
  }
}

void StoredSession::Impl::Restore(Session& session) {
  auto files = std::make_shared<MappedFiles>(name);
  Session::Impl& to = *session.impl_;
  MapRows(session, files.get());
  for (const ArchivedFile& file : manifest.files) {
    if (file.kind == ArchiveKind::kPieces) files->Map(path, file);
  }
  if (const ArchivedFile* queries = manifest.Find(ArchiveKind::kQueries); queries != nullptr) {
    StateReader in(files->MapChecked(path, *queries).data(), nullptr,
                   "queries of session '" + name + "'");
    for (LayerQueries& layer : to.queries) {
      layer.samples.Load(&in);
      layer.recent.Load(&in);
    }
    in.Finish();
  }
  StateReader in(files->MapChecked(path, *manifest.Find(ArchiveKind::kState)).data(), files.get(),
                 "state of session '" + name + "'");
  SavedState state = ReadState(manifest, &in);
  to.query_strides = std::move(state.query_strides);
  to.mapped = files;
  if (manifest.has_index && to.method->spec() == manifest.method) {
    to.method->Load(&in);
    in.Finish();
  }
  to.tokens = std::move(state.tokens);
  to.rows.Commit(manifest.saved_tokens);
  // The index is that of the saved tokens; what was truncated since is taken from it now.
  if (manifest.n_tokens < manifest.saved_tokens) {
    session.Truncate(manifest.n_tokens);
  } else if (state.logits.size() == Size(model->info().n_vocab)) {
    to.restored_logits = std::move(state.logits);
    to.logits = to.restored_logits;
  }
  to.stored_tokens = manifest.n_tokens;
  queries_version = manifest.n_tokens < manifest.saved_tokens ? 0 : to.queries_version;
  places = files->places();
  std::vector<ArchivedFile> large;
  std::int64_t bytes = 0;
  for (const ArchivedFile& file : manifest.files) {
    if (file.kind != ArchiveKind::kRows && file.kind != ArchiveKind::kPieces) continue;
    large.push_back(file);
    bytes += file.digest.bytes;
  }
  if (bytes > DescribeMachine().available_bytes / 2) return;
  verification = std::make_unique<Verification>();
  verification->Start(path, std::move(large));
}

bool StoredSession::WaitVerified() {
  if (impl_->verification == nullptr) return !impl_->saved;
  impl_->verification->Wait();
  return true;
}

// Row files of the session as it is now. Those before the first changed block stay.
std::vector<ArchivedFile> StoredSession::Impl::SaveRows(const Session::Impl& session,
                                                        std::uint64_t* number) const {
  const auto n_tokens = static_cast<std::int64_t>(session.tokens.size());
  std::vector<ArchivedFile> files;
  std::int64_t end = 0;  // of what the files hold
  const std::int64_t unchanged = saved ? std::min(session.stored_tokens, n_tokens) : 0;
  for (const ArchivedFile& file : manifest.files) {
    if (file.kind != ArchiveKind::kRows || file.first >= unchanged) continue;
    files.push_back(file);
    end = std::min(file.first + file.count, unchanged);
  }
  if (end == n_tokens) return files;
  std::int64_t first = end / kBlockTokens * kBlockTokens;
  while (!files.empty() &&
         (files.back().first >= first || first - files.back().first <= n_tokens - first)) {
    first = std::min(first, files.back().first);
    files.pop_back();
  }
  files.push_back(WriteRows(path, (*number)++, session.rows, first, n_tokens - first));
  return files;
}

Manifest StoredSession::Impl::SaveFiles(Session::Impl& session,
                                        PieceFile::Places* new_places) const {
  Manifest next = manifest;
  next.method = session.method->spec();
  next.fingerprint["statistics"] = StatisticsOf(session.options.calibration.get());
  next.n_tokens = next.saved_tokens = static_cast<std::int64_t>(session.tokens.size());
  next.files = SaveRows(session, &next.next_number);
  const ArchivedFile* queries = manifest.Find(ArchiveKind::kQueries);
  if (saved && queries != nullptr && queries_version == session.queries_version) {
    next.files.push_back(*queries);
  } else {
    StateWriter out;
    for (const LayerQueries& layer : session.queries) {
      layer.samples.Save(&out);
      layer.recent.Save(&out);
    }
    next.files.push_back(WriteBytes(path, next.next_number++, ArchiveKind::kQueries, out.bytes()));
  }
  PieceFile pieces(path, next.next_number++, places);
  StateWriter out(&pieces);
  out.PutAll(session.tokens);
  out.PutAll(session.query_strides);
  out.PutAll(session.logits);
  next.has_index = session.method->Save(&out);
  next.files.push_back(WriteBytes(path, next.next_number++, ArchiveKind::kState, out.bytes()));
  for (const ArchivedFile& file : pieces.Finish(manifest.files)) next.files.push_back(file);
  *new_places = pieces.places();
  return next;
}

// Whether the manifest on disk is `next`.
bool StoredSession::Impl::IsCurrent(const Manifest& next) const {
  try {
    return folder.Has(name) && ManifestText(ReadManifest(path)) == ManifestText(next);
  } catch (const Error&) {
    return false;
  }
}

void StoredSession::Save(Session& session) {
  Session::Impl& from = *session.impl_;
  if (&session.model() != impl_->model.get()) {
    throw Error(ErrorCode::kUsage, "session '" + impl_->name + "' belongs to another model");
  }
  const std::int64_t bytes =
      DiskBytes(impl_->model->info(), MethodSpec::Parse(from.options.method), session.n_tokens());
  impl_->evicted =
      impl_->folder.MakeRoom(std::max<std::int64_t>(bytes - impl_->SavedBytes(), 0), impl_->name);
  // What would be built on damaged rows must not be saved.
  if (impl_->verification != nullptr) impl_->verification->Wait();
  PieceFile::Places places;
  Manifest next;
  std::exception_ptr failure;
  try {
    next = impl_->SaveFiles(from, &places);
    WriteManifest(impl_->path, next);
  } catch (...) {
    failure = std::current_exception();
    if (!impl_->IsCurrent(next)) {
      RemoveUnnamed(impl_->path, impl_->manifest);
      throw;
    }
    // Replaced, but perhaps not durably: that is what there is now.
  }
  impl_->saved = true;
  impl_->manifest = std::move(next);
  impl_->places = std::move(places);
  impl_->tokens = from.tokens;
  impl_->queries_version = from.queries_version;
  from.stored_tokens = session.n_tokens();
  if (failure) std::rethrow_exception(failure);
  RemoveUnnamed(impl_->path, impl_->manifest);
}

std::int64_t StoredSession::DiskBytes(const ModelInfo& model, const MethodSpec& method,
                                      std::int64_t n_tokens) {
  constexpr std::int64_t kFiles = 32;  // header pages, manifest
  constexpr std::int64_t kSegmentTokens = 64 * kBlockTokens;
  const std::int64_t dim = model.heads.head_dim;
  const std::int64_t n_heads = std::int64_t{model.n_layers} * model.heads.n_kv_heads;
  // Codec and errors of every segment; basis, statistics and sums of a KV head.
  const std::int64_t segment = dim * (kLevels * 8 + (2 + kPlanes * kPlanes) * 4) + 128;
  const std::int64_t head = 8 * dim * dim + 512 * dim + (n_tokens / kSegmentTokens + 1) * segment;
  const std::int64_t rows = RowStore::Bytes(model.n_layers, model.heads, WholeBlocks(n_tokens));
  const std::int64_t index = IndexBytes(method, model.n_layers, model.heads, n_tokens);
  const std::int64_t state = n_tokens * std::int64_t{sizeof(Token)} +
                             model.n_vocab * std::int64_t{sizeof(float)} + n_heads * head;
  return rows + index + state + QuerySampleBytes(model.n_layers, model.heads, n_tokens) +
         kFiles * static_cast<std::int64_t>(kArchivePage);
}

void StoredSession::CheckSpace(const MethodSpec& method, std::int64_t n_tokens) const {
  const std::int64_t bytes = DiskBytes(impl_->model->info(), method, n_tokens);
  const std::int64_t more = std::max<std::int64_t>(bytes - impl_->SavedBytes(), 0);
  impl_->evicted = impl_->folder.MakeRoom(more, impl_->name);
  struct statvfs status = {};
  if (statvfs(impl_->path.c_str(), &status) != 0) ThrowIo("examine", impl_->path, errno);
  const auto free = static_cast<std::int64_t>(status.f_bavail * status.f_frsize);
  if (more <= free) return;
  throw Error(ErrorCode::kNoMemory,
              "session '" + impl_->name + "' of " + std::to_string(n_tokens) + " tokens needs " +
                  std::to_string(more) + " bytes on disk, and '" +
                  impl_->path.parent_path().string() + "' has " + std::to_string(free) +
                  " free; free some space, or use another --session-dir");
}

}  // namespace fathom

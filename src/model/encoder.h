// The crammed encoder (recipe: Geiping & Goldstein, ICML 2023) with an explicit backward pass, whole or cut into
// pipeline blocks.
//
// No autograd: gradients go straight into the flat buffers of the parameter store, and bf16 weights can have fp32
// gradients. Legend: B rows, S tokens a row, N = B*S, H hidden, M masked positions, V vocabulary, t tensor ranks.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "model/attention.h"
#include "model/dropout.h"
#include "model/embedding.h"
#include "model/ffn.h"
#include "model/mlm_head.h"
#include "model/stage_split.h"

namespace cram {

/// One micro-batch as the model sees it. A stage uses what it needs: ids the first, positions and labels the last.
struct MicroBatch {
  at::Tensor ids;        // [B,S] int64
  at::Tensor positions;  // [M] int64, flat b*S+s
  at::Tensor labels;     // [M] int64
  DropoutSource dropout;
};

/// True when training computes the last layer, from its queries on, for the masked positions only: nothing else of its
/// output is used, and only keys and values are needed of all rows. With several tensor ranks, whose exchanges have
/// fixed sizes, or with dropout, whose counters are rows, it is computed whole. The numbers are the same.
[[nodiscard]] bool last_layer_is_sparse(const ModelConfig& config, int tensor_ranks);

/// Pre-norm layer: x += dropout(attn(norm1(x))); x += dropout(ffn(norm2(x))).
class EncoderLayer {
 public:
  struct Saved {
    at::Tensor input;  // [N or N/t,H]; the only one kept when the layer is computed again
    LayerNorm::Saved norm1, norm2;
    SelfAttention::Saved attention;
    GatedFfn::Saved ffn;
  };

  EncoderLayer(std::int64_t index, const ModelConfig& config, ParameterStore& store, const TensorRegion& tensor);
  /// x [N or N/t,H] -> the same shape; where `is_sparse`, training (`saved` given) gives the masked rows [M,H].
  [[nodiscard]] at::Tensor forward(const at::Tensor& x, const MicroBatch& batch, Saved* saved) const;
  /// dy as forward gave -> dx [N or N/t,H].
  [[nodiscard]] at::Tensor backward(const at::Tensor& dy, const MicroBatch& batch, const Saved& saved) const;
  [[nodiscard]] bool is_sparse() const { return is_sparse_; }

 private:
  /// `picks` [M]: the rows that are wanted; undefined: all.
  [[nodiscard]] at::Tensor compute(const at::Tensor& x, const MicroBatch& batch, const at::Tensor& picks,
                                   Saved* saved) const;
  std::int64_t index_;
  bool recompute_, is_sparse_;
  TensorRegion tensor_;
  LayerNorm norm1_;
  SelfAttention attention_;
  LayerNorm norm2_;
  GatedFfn ffn_;
};

/// Where a rank's part of the model is: its tensor group, its pipeline, and the ranges of all blocks, block b on
/// pipeline rank b % p.
struct Placement {
  TensorRegion tensor;
  Communicator* pipeline = nullptr;  ///< nullptr: one stage
  std::vector<BlockRange> blocks;    ///< empty: one block, everything

  [[nodiscard]] int stages() const { return pipeline == nullptr ? 1 : pipeline->size(); }
  [[nodiscard]] int stage() const { return pipeline == nullptr ? 0 : pipeline->rank(); }
};

class Encoder {
 public:
  /// Registers the parameters of this rank's blocks with the store, which the caller allocates and fills afterwards.
  /// Methods are collective over the tensor group. Store and groups must outlive the encoder. Throws Error(kUsage) with
  /// the legal sizes when the group cannot share the model.
  Encoder(const ModelConfig& config, ParameterStore& store, const Placement& placement);
  /// One stage.
  Encoder(const ModelConfig& config, ParameterStore& store, Communicator& tensor);
  /// One rank.
  Encoder(const ModelConfig& config, ParameterStore& store);

  // ---- training, block by block
  struct BlockSaved {
    Embedding::Saved embedding;
    std::vector<EncoderLayer::Saved> layers;
    MlmHead::Saved head;
    at::Tensor d_logits;  // [M,R]
    at::Tensor loss_sum;  // [] fp64, of the last block
  };
  /// Called when the gradients of a run of parameters [first, end) of this micro-batch are complete.
  using GradientsComplete = std::function<void(ParamId first, ParamId end)>;

  /// Block b of this rank: x [N or N/t,H] from the block before (undefined for block 0) -> activation; the last block
  /// goes on to the loss and returns an undefined tensor.
  [[nodiscard]] at::Tensor forward_block(int block, const MicroBatch& batch, const at::Tensor& x, BlockSaved& saved);
  /// Adds the gradient of the loss SUM to the store's gradients; returns that of the block's input, undefined for block
  /// 0. Frees what `saved` holds as it goes. `complete` may be empty.
  [[nodiscard]] at::Tensor backward_block(int block, const MicroBatch& batch, const at::Tensor& dy, BlockSaved& saved,
                                          const GradientsComplete& complete);
  /// Shape [rows,H] of an activation between blocks for a micro-batch of B x S.
  [[nodiscard]] at::Tensor make_activation(std::int64_t batch, std::int64_t seq) const;
  [[nodiscard]] int blocks() const { return static_cast<int>(ranges_.size()); }
  [[nodiscard]] const std::vector<BlockRange>& ranges() const { return ranges_; }

  /// One training micro-batch where all blocks are on this rank: adds the gradient of the loss SUM to the store's
  /// gradients and returns that sum as [] fp64 on the device.
  [[nodiscard]] at::Tensor forward_backward(const at::Tensor& ids, const at::Tensor& positions,
                                            const at::Tensor& labels);

  // ---- forward only; collective over the pipeline as well
  struct Evaluation {
    at::Tensor loss_sum;  // [] fp64
    at::Tensor correct;   // [] int64
  };
  /// Loss sum and number of correct predictions, no gradients. With several stages they are on the last one, and zero
  /// elsewhere, so that stages can run ahead of each other; the caller adds them up.
  [[nodiscard]] Evaluation evaluate(const at::Tensor& ids, const at::Tensor& positions, const at::Tensor& labels);
  /// Logits [M,V] at the positions, on every rank.
  [[nodiscard]] at::Tensor logits(const at::Tensor& ids, const at::Tensor& positions);
  /// Hidden states [B,S,H] after the final norm, on every rank.
  [[nodiscard]] at::Tensor hidden(const at::Tensor& ids);

  [[nodiscard]] const ModelConfig& config() const { return config_; }

 private:
  struct ParamRange {
    ParamId first = 0, end = 0;
  };
  struct Part {
    int block = 0;
    std::vector<std::unique_ptr<EncoderLayer>> layers;
    std::vector<ParamRange> layer_params;
  };
  Encoder(const ModelConfig& config, ParameterStore& store, std::unique_ptr<Communicator> alone);
  [[nodiscard]] Part& part_of(int block);
  /// Relays a forward pass through all stages; the last one's activation there, undefined elsewhere.
  [[nodiscard]] at::Tensor trunk(const at::Tensor& ids);
  [[nodiscard]] bool has_head() const { return head_.has_value(); }
  [[nodiscard]] at::Tensor from_last_stage(at::Tensor made, const std::vector<std::int64_t>& shape);

  std::unique_ptr<Communicator> alone_;  // where no group was given
  ModelConfig config_;
  const ParameterStore& store_;
  Placement place_;
  std::vector<BlockRange> ranges_;
  VocabularyRange vocabulary_;
  std::optional<Embedding> embedding_;
  std::optional<MlmHead> head_;
  ParamRange embedding_params_, head_params_;
  std::vector<Part> parts_;
};

/// Names of all parameters of a model, whatever this rank holds of it.
[[nodiscard]] std::set<std::string> parameter_names(const ModelConfig& config);

}  // namespace cram

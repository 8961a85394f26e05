#pragma once
#include "base/special_tokens.h"

//! Values of any type that can be deserialized, at random: what `serde` asks for is made up instead of read.
//!
//! So a test need not know the messages to send all of them, and one that is added tomorrow is sent tomorrow.

use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, EnumAccess, IntoDeserializer, SeqAccess, VariantAccess,
    Visitor, value::Error,
};

/// Where values come from.
pub struct Chance<'a> {
    pub rng: &'a mut StdRng,
    /// Numbers that mean something: handles, keys, addresses. Every second number is one of them.
    pub known: &'a [u64],
    /// A GID that means something.
    pub gid: [u8; 16],
}

impl Chance<'_> {
    /// A value.
    pub fn value<T: DeserializeOwned>(&mut self) -> T {
        loop {
            // Some numbers are no value of their type; then others are tried.
            if let Ok(value) = T::deserialize(&mut *self) {
                return value;
            }
        }
    }

    /// A number: one that is known, a small one, one near a limit, or any.
    pub fn number(&mut self) -> u64 {
        let known = self.known.choose(self.rng).filter(|_| self.rng.random());
        known
            .copied()
            .unwrap_or_else(|| match self.rng.random_range(0..5) {
                0 | 1 => self.rng.random_range(0..8),
                2 => self.rng.random_range(0..1 << 16),
                3 => u64::MAX - self.rng.random_range(0..8),
                _ => self.rng.random(),
            })
    }
}

macro_rules! numbers {
    ($($method:ident $visit:ident $type:ty;)*) => {
        $(fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            visitor.$visit(self.number() as $type)
        })*
    };
}

impl<'de> Deserializer<'de> for &mut Chance<'_> {
    type Error = Error;

    numbers! {
        deserialize_u8 visit_u8 u8;
        deserialize_u16 visit_u16 u16;
        deserialize_u32 visit_u32 u32;
        deserialize_u64 visit_u64 u64;
        deserialize_i8 visit_i8 i8;
        deserialize_i16 visit_i16 i16;
        deserialize_i32 visit_i32 i32;
        deserialize_i64 visit_i64 i64;
    }

    fn is_human_readable(&self) -> bool {
        false
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.deserialize_u64(visitor)
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_bool(self.rng.random())
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let length = self.rng.random_range(0..300);
        visitor.visit_string((0..length).map(|_| self.rng.random::<char>()).collect())
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.deserialize_string(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.rng.random() {
            true => visitor.visit_some(self),
            false => visitor.visit_none(),
        }
    }

    fn deserialize_unit<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_unit()
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let left = self.rng.random_range(0..5);
        visitor.visit_seq(Elements { chance: self, left })
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, length: usize, visitor: V) -> Result<V::Value, Error> {
        if length == self.gid.len() && self.rng.random() {
            return visitor.visit_seq(serde::de::value::SeqDeserializer::new(self.gid.into_iter()));
        }
        visitor.visit_seq(Elements {
            chance: self,
            left: length,
        })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_seq(Elements {
            chance: self,
            left: fields.len(),
        })
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        let index = self.rng.random_range(0..variants.len() as u32);
        visitor.visit_enum(Variant { chance: self, index })
    }

    serde::forward_to_deserialize_any! {
        i128 u128 f32 f64 char bytes byte_buf unit_struct tuple_struct map identifier ignored_any
    }
}

struct Elements<'a, 'c> {
    chance: &'a mut Chance<'c>,
    left: usize,
}

impl<'de> SeqAccess<'de> for Elements<'_, '_> {
    type Error = Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Error> {
        if self.left == 0 {
            return Ok(None);
        }
        self.left -= 1;
        seed.deserialize(&mut *self.chance).map(Some)
    }
}

struct Variant<'a, 'c> {
    chance: &'a mut Chance<'c>,
    index: u32,
}

impl<'de> EnumAccess<'de> for Variant<'_, '_> {
    type Error = Error;
    type Variant = Self;

    fn variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<(T::Value, Self), Error> {
        let index: serde::de::value::U32Deserializer<Error> = self.index.into_deserializer();
        Ok((seed.deserialize(index)?, self))
    }
}

impl<'de> VariantAccess<'de> for Variant<'_, '_> {
    type Error = Error;

    fn unit_variant(self) -> Result<(), Error> {
        Ok(())
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, Error> {
        seed.deserialize(self.chance)
    }

    fn tuple_variant<V: Visitor<'de>>(self, length: usize, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_seq(Elements {
            chance: self.chance,
            left: length,
        })
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.tuple_variant(fields.len(), visitor)
    }
}
